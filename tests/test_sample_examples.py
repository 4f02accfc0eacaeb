"""The scripts behind `make pretrain` and `make compare` start what they say, on any number of cores."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from tests.launch import ROOT


def started(script: str, folder: Path, num_gpus: int = 0, **environment: str) -> list[str]:
    """The words of the command that a script ends with, which is not run, on a machine with `num_gpus` GPUs.

    The last word is the command's `CUDA_VISIBLE_DEVICES`.
    """
    says = 'printf "%s\\n" "$@" "${CUDA_VISIBLE_DEVICES-all}"\n'
    gpus = "".join(f"echo 'GPU {index}: NVIDIA H100'\n" for index in range(num_gpus))
    for name, text in {"torchrun": says, "python": says, "nvidia-smi": gpus}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}")
        program.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    own = ("CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE", "PIPELINE_SIZE")
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    ran = subprocess.run(
        [str(ROOT / "examples" / script), "--seed", "7"],
        env={**inherited, **path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


@pytest.mark.parametrize(("given", "num_ranks"), [({}, None), ({"PIPELINE_SIZE": "2"}, 2), ({"PIPELINE_SIZE": "8"}, 8)])
def test_the_sample_is_trained_on_as_many_ranks(given: dict[str, str], num_ranks: int | None, tmp_path: Path) -> None:
    progress, *words = started("pretrain_sample.sh", tmp_path, **given)
    assert words[:2] == ["--standalone", "--nproc-per-node"]
    ranks = int(words[2])
    cores = len(os.sched_getaffinity(0))
    assert ranks == num_ranks or (num_ranks is None and (2 <= ranks <= max(2, cores) or cores < 2))
    assert progress.startswith(f"starting {ranks} pipeline ranks")
    parsed = parse_arguments(words[words.index("pretrain_gpt.py") + 1 : -1])
    args, job = complete_and_check(parsed, {"WORLD_SIZE": str(ranks)}, has_cuda=False, for_this_machine=False)
    assert job.is_layout_open
    assert args.seed == 7


@pytest.mark.parametrize(
    ("num_gpus", "given", "num_ranks", "visible"),
    [
        (1, {}, None, ""),
        (1, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 2, "all"),
        (1, {"PIPELINE_SIZE": "1"}, 1, "all"),
        (4, {}, 4, "all"),
    ],
)
def test_each_rank_has_a_gpu_or_all_run_on_cores(
    num_gpus: int, given: dict[str, str], num_ranks: int | None, visible: str, tmp_path: Path
) -> None:
    words = started("pretrain_sample.sh", tmp_path, num_gpus, **given)
    without = started("pretrain_sample.sh", tmp_path, **given)
    assert int(words[3]) == (num_ranks or int(without[3]))
    assert words[-1] == visible


def test_the_comparison_has_the_same_model(tmp_path: Path) -> None:
    _, *trained = started("pretrain_sample.sh", tmp_path)
    *compared, _ = started("compare_sample.sh", tmp_path)
    own, shared = compared[: compared.index("--")], compared[compared.index("--") + 1 :]
    assert "--losses" in own
    assert own[-2:] == ["--seed", "7"]
    assert " ".join(shared[: shared.index("--micro-batch-size")]) in " ".join(trained)
