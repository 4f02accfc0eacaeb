"""Parameters sharded by torch's FSDP2 train as under DDP in other layouts of ranks. Exhaustive: up to eight ranks each.

The sharding itself is in `make test`, on two replicas of two stages. Between two shards a sum has one order, so numbers
are those of DDP byte for byte. Between four it depends on where in a message an element is, which differs from DDP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import TINY_GPT
from tests.ranks import close_ranks
from tests.trainings import run_trainings

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _ranks_of_a_layout() -> Iterator[None]:
    """End the ranks after each layout: torch's cache of operations on DTensors keeps the groups of another layout."""
    yield
    close_ranks()


COMMON = (
    *(*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "4"),
    *("--untie-embeddings-and-output-weights", "--clip-grad", "0"),
)
ZB_2P = ("--zero-bubble-schedule", "zb-2p")
CONTEXT = (*ZB_2P, "--context-parallel-size", "2", "--position-embedding-type", "rope", "--attention-dropout", "0")
TWO_SHARDS = {
    "sequence": (8, (*ZB_2P, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--swiglu")),
    "context": (4, CONTEXT),
    "chosen": (4, ("--zero-bubble", "--zero-bubble-vocabulary-parallel", "off")),
}
"""Ranks and flags of each layout."""
FOUR_SHARDS = {
    "context and replicas": (8, CONTEXT),
    "replicas in a V": (8, ("--zero-bubble-schedule", "zb-v")),
}

WITH_ZERO_2 = ("context", "replicas in a V")
"""Layouts that also keep parameters whole from a forward to its backward; test_fully_sharded.py has other schedules."""


@pytest.mark.parametrize("layout", [*TWO_SHARDS, *FOUR_SHARDS])
def test_losses_are_those_of_ddp_and_a_resumed_job_has_the_same(layout: str, tmp_path: Path) -> None:
    num_ranks, more = (TWO_SHARDS | FOUR_SHARDS)[layout]
    flags, checkpoint = [*COMMON, *more], str(tmp_path / "checkpoint")
    sharded = [*flags, "--use-torch-fsdp2"]
    trainings = {
        "ddp": flags,
        "sharded": sharded,
        "saved": [*sharded, "--save", checkpoint, "--exit-interval", "2"],
        "resumed": [*sharded, "--load", checkpoint],
        "resumed by ddp": [*flags, "--load", checkpoint],
    }
    if layout in WITH_ZERO_2:
        trainings["zero-2"] = [*sharded, "--torch-fsdp2-no-reshard-after-forward"]
    run_trainings(num_ranks, trainings, tmp_path)
    lines = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in trainings}
    losses = {name: [float.fromhex(json.loads(line)["lm_loss"]) for line in of] for name, of in lines.items()}
    if layout in WITH_ZERO_2:
        assert lines["zero-2"] == lines["sharded"]
    assert losses["resumed"] == losses["sharded"][2:]
    if layout in TWO_SHARDS:
        assert losses["sharded"] == losses["ddp"]
        assert losses["resumed by ddp"] == losses["ddp"][2:]
    else:
        assert losses["sharded"] == pytest.approx(losses["ddp"], rel=1e-6)
        assert losses["resumed by ddp"] == pytest.approx(losses["ddp"][2:], rel=1e-6)
    if layout != "chosen":  # each new job may choose another one
        assert lines["resumed"] == lines["sharded"][2:]
    if layout in TWO_SHARDS and layout != "chosen":
        assert [json.loads(line)["parameters"] for line in lines["sharded"]] == [
            json.loads(line)["parameters"] for line in lines["ddp"]
        ]


def test_a_checkpoint_of_shards_is_loaded_by_other_layouts(tmp_path: Path) -> None:
    """Also a gated layer's, whose rows have another order in each layout."""
    # This vocabulary is padded to 256 with one tensor-parallel rank and with two.
    flags = [*COMMON, "--vocab-size", "250", "--swiglu", "--attention-dropout", "0", "--hidden-dropout", "0"]
    sharded, checkpoint = [*flags, "--use-torch-fsdp2"], str(tmp_path / "checkpoint")
    one_stage = ("--pipeline-model-parallel-size", "1")
    others = {
        "ddp": (*flags, *one_stage, "--tensor-model-parallel-size", "2"),
        "tensor": (*sharded, *one_stage, "--tensor-model-parallel-size", "2"),
        "four replicas": (*sharded, *one_stage),
    }
    trainings = {
        "uncut": [*sharded, *ZB_2P],
        "saved": [*sharded, *ZB_2P, "--save", checkpoint, "--exit-interval", "2"],
        **{name: [*more, "--load", checkpoint] for name, more in others.items()},
    }
    run_trainings(4, trainings, tmp_path)
    losses = {
        name: [float.fromhex(json.loads(line)["lm_loss"]) for line in (tmp_path / f"{name}.jsonl").open()]
        for name in trainings
    }
    for name in others:
        assert losses[name] == pytest.approx(losses["uncut"][2:], rel=1e-5)
