"""Pipelines of plain layers over two processes: the example, checkpoints, replicas and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_threads import error_of
from test_pipeline_numerics import SCHEDULES

from tests.launch import ROOT, run_script


def test_the_example_trains_and_finds_the_bits_of_one_process(tmp_path: Path) -> None:
    printed = run_script(2, ROOT / "examples" / "plain_pytorch.py", tmp_path)
    assert "losses, norms and parameters are equal to one process's, bit for bit" in printed
    assert "W stays in B: LayerNorm, 0.3% of the parameters" in printed
    assert len((ROOT / "examples" / "plain_pytorch.py").read_text().splitlines()) <= 120


@pytest.mark.exhaustive  # test_pipeline_alexnet.py and test_pipeline_llama.py have its layers
@pytest.mark.parametrize(("name", "library"), [("alexnet", "skimage"), ("llama", "transformers")])
def test_the_examples_of_whole_models_find_the_bits_of_one_process(name: str, library: str, tmp_path: Path) -> None:
    """With smaller batches and images than `make examples`, and the same layers."""
    pytest.importorskip(library)
    printed = run_script(2, Path(__file__).parent / "small_example.py", tmp_path, name)
    assert "losses and parameters are equal to one process's, bit for bit" in printed


def test_a_checkpoint_is_loaded_on_another_number_of_ranks_and_replicas_train_as_in_ddp(tmp_path: Path) -> None:
    printed = run_script(2, Path(__file__).parent / "two_ranks.py", tmp_path, str(tmp_path / "checkpoint"))
    before = "a batch of 8 samples does not divide into 3 microbatches"
    within = f"microbatch 2: layer 0 (Linear) failed: {error_of(torch.nn.Linear(6, 6), (2, 7))}"
    replicas = "replicas must be a group of ranks with the same stages, one rank of each replica; its first rank has "
    reducer = (
        "uses DistributedDataParallel, which needs a forward before each backward: give replicas=... to Pipeline, or "
        "use fully_shard"
    )
    expected = [
        f"rank {rank}: {problem}"
        for rank in range(2)
        for problem in (
            before,
            within,
            f"{replicas}0.weight ([6, 6], torch.float32, True), rank 1 has 6.weight ([6, 6], torch.float32, True)",
            f"{replicas}0.weight ([6, 6], torch.float32, True), rank 1 has 0.weight ([7, 6], torch.float32, True)",
            f"layer 0 (Sequential) {reducer}",
            f"layer 0 (DistributedDataParallel) {reducer}",
            *["replica 1: microbatch 0: layer 0 (Limited) failed: RuntimeError: too large"] * 2,
        )
    ]
    assert sorted(line for line in printed.splitlines() if line) == sorted(expected)


# The same shapes go between threads in test_pipeline_shapes.py, and through two processes above.
@pytest.mark.exhaustive
def test_shapes_change_between_four_processes_under_every_schedule(tmp_path: Path) -> None:
    assert run_script(4, Path(__file__).parent / "four_ranks.py", tmp_path).split() == SCHEDULES
