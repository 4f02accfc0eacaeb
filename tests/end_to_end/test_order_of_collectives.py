"""All members of a group start the same collectives, of the same sizes, in the same order, as NCCL demands.

`make test` runs one schedule under each layout, those that start the most kinds of collectives; those that are
exhaustive start fewer.
"""

from __future__ import annotations

import json

import pytest

from tests.changes import RecordedCollectives, WarmedUp
from tests.collectives import IN_VALIDATION, Call, disagreements
from tests.launch import TINY_GPT
from tests.trainings import Trainings

COMMON = [
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "6", "--eval-interval", "3"),
    *("--eval-iters", "1", RecordedCollectives(), WarmedUp()),
]
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
DATA = (
    *("--overlap-grad-reduce", "--ddp-bucket-size", "4000", "--use-distributed-optimizer", "--overlap-param-gather"),
    "--untie-embeddings-and-output-weights",
)
TRAININGS = {
    "dp2-zb-2p": (*DATA, "--zero-bubble-schedule", "zb-2p"),
    "dp2-planned": (*DATA, "--zero-bubble", "--zero-bubble-keep-layout"),
    "dp2-zb-v": (*DATA, "--zero-bubble-schedule", "zb-v"),
    "tp2-zb-2p": (*TENSOR, "--zero-bubble-schedule", "zb-2p"),
    "tp2-planned": (*TENSOR, "--zero-bubble", "--zero-bubble-keep-layout"),
    "tp2-post-validation": (*TENSOR, "--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation"),
}


QUICK = ("dp2-planned", "tp2-post-validation")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Trainings on four ranks, each of which writes down its collectives."""
    flags = {name: [*COMMON, *more] for name, more in TRAININGS.items()}
    return Trainings(4, flags, tmp_path_factory.mktemp("collectives"))


def calls(trainings: Trainings, name: str) -> list[list[Call]]:
    trainings.run(name)
    logs = [json.loads((trainings.folder / f"{name}.{rank}.calls").read_text()) for rank in range(4)]
    return [[(tuple(ranks), function, tuple(sizes)) for ranks, function, sizes in log] for log in logs]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in TRAININGS]
)
def test_members_of_a_group_agree(trainings: Trainings, name: str) -> None:
    logs = calls(trainings, name)
    assert disagreements(logs) == []
    # Ranks 0 and 1 are replicas, or share each layer: six steps of all their buckets, or of all layers.
    shared = [function for ranks, function, _ in logs[0] if ranks == (0, 1)]
    expected = "reduce_scatter_tensor"
    assert shared.count(expected) >= 6 * (2 if name.startswith("dp2") else 8), "the log misses calls"
    assert sum(ranks == (0, 2) for ranks, _, _ in logs[0]) >= 6, "the norm over the pipeline, each step"


def test_while_a_step_is_validated_no_rank_waits_for_the_pipeline_to_write_its_log(trainings: Trainings) -> None:
    logs = calls(trainings, "tp2-post-validation")
    during = [call for log in logs for call in log if call[1].endswith(IN_VALIDATION)]
    assert {ranks for ranks, _, _ in during} <= {(0, 1), (2, 3)}, "forwards run again within a stage, nothing else"
    assert any(function == "all_gather_object" for ranks, function, _ in logs[0] if ranks == (0, 2)), "the idle shares"


def test_another_order_another_size_and_a_missing_call_are_found() -> None:
    first: list[Call] = [((0, 1), "all_reduce", (4,)), ((0, 1), "broadcast", (4,))]
    solo: Call = ((0,), "barrier", ())
    assert disagreements([first, first]) == []
    assert disagreements([[solo, *first], first]) == []
    assert disagreements([first, first[::-1]]) == ["group (0, 1): ranks 0 and 1 differ at call 0"]
    assert disagreements([first, [first[0], ((0, 1), "broadcast", (5,))]]) == [
        "group (0, 1): ranks 0 and 1 differ at call 1"
    ]
    assert disagreements([first, first[:1]]) == ["group (0, 1): ranks 0 and 1 differ at call 1"]
