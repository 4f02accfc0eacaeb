"""Replicas step alone and average their parameters when the hierarchy says so, under every schedule.

`make test` shows the method without pipelines and with two. Exhaustive are resumed jobs, post-validation and other
layouts, whose own tests are in `make test`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.comparison import printed_losses, tensors
from tests.launch import TINY_GPT
from tests.trainings import Trainings

TWO_BY_TWO = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--eval-iters", "1"]
"""Two replicas of a pipeline of two ranks; both tie the embedding to the output layer, in two stages."""
SGD = ("--optimizer", "sgd", "--clip-grad", "0", "--train-iters", "20", "--log-interval", "20")
LOCAL = ("--hierarchical-sgd", "3:2")
HALVES = ("--lr-decay-iters", "10", "--eval-interval", "4", *LOCAL, "--zero-bubble-schedule", "zb-h1")
LAYOUTS = {
    "tensor": ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--overlap-grad-reduce"),
    "context": (
        *("--context-parallel-size", "2", "--position-embedding-type", "rope"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
    "V": ("--pipeline-model-parallel-size", "2", "--zero-bubble-schedule", "zb-v"),
}
"""Flags of layouts that make two replicas of four ranks."""
SHORT = (*TINY_GPT, "--global-batch-size", "4", "--eval-iters", "0", *SGD, "--train-iters", "10")
POST = (*LOCAL, "--hierarchical-sgd-warmup", "2", "--zero-bubble-schedule", "zb-2p", "--clip-grad", "0.5", "--bf16")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("hierarchical")

    def saved(name: str, interval: int) -> tuple[str, ...]:
        return ("--save", str(folder / name), "--save-interval", str(interval))

    layouts = {}
    for name, flags in LAYOUTS.items():
        layouts[f"reduced-{name}"] = [*SHORT, *flags, *saved(f"reduced-{name}", 10)]
        layouts[f"averaged-{name}"] = [*SHORT, *flags, "--hierarchical-sgd", "1:2", *saved(f"averaged-{name}", 10)]
    four = [*TINY_GPT, "--global-batch-size", "4", "--eval-iters", "0", "--train-iters", "8"]
    return Trainings(
        4,
        {
            "reduced": [*TWO_BY_TWO, *SGD, *saved("reduced", 20)],
            "averaged": [*TWO_BY_TWO, *SGD, "--hierarchical-sgd", "1:2", *saved("averaged", 20)],
            "four": [*four, "--hierarchical-sgd", "2:2,4:4", "--overlap-grad-reduce", "--log-interval", "4"],
            "whole": [*TWO_BY_TWO, *HALVES, *saved("whole", 5)],
            "first half": [*TWO_BY_TWO, *HALVES, *saved("first half", 5), "--exit-interval", "5"],
            "second half": [*TWO_BY_TWO, *HALVES, *saved("second half", 5), "--load", str(folder / "first half")],
            "validated before": [*TWO_BY_TWO, *POST],
            "validated later": [*TWO_BY_TWO, *POST, "--zero-bubble-post-validation"],
            **layouts,
        },
        folder,
    )


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, with which checkpoints are read."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def digests(trainings: Trainings, name: str) -> list[list[str]]:
    """For each iteration the digest of each rank's parameters."""
    return [json.loads(line)["parameters"] for line in trainings.numerics(name).splitlines()]


@pytest.mark.usefixtures("alone")
def test_averaging_every_iteration_is_data_parallelism(trainings: Trainings) -> None:
    trainings.run("reduced", "averaged")
    assert_close(*(tensors(trainings.folder, name, 20) for name in ("reduced", "averaged")))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_it_is_in_other_layouts(trainings: Trainings, layout: str) -> None:
    names = f"reduced-{layout}", f"averaged-{layout}"
    trainings.run(*names)
    assert_close(*(tensors(trainings.folder, name, 10) for name in names))


def assert_close(expected: dict[str, torch.Tensor], averaged: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == averaged.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(averaged[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def test_groups_have_equal_parameters_when_they_have_averaged(trainings: Trainings) -> None:
    groups = [
        [len(set(ranks)), *(len(set(ranks[at : at + 2])) for at in (0, 2))] for ranks in digests(trainings, "four")
    ]
    alone, pairs, all_equal = [4, 2, 2], [2, 1, 1], [1, 1, 1]
    assert groups == [alone, pairs, alone, all_equal] * 2


def test_the_log_line_has_the_mean_loss_and_the_waits_of_all_replicas(trainings: Trainings) -> None:
    lines = [line for line in trainings.printed("four").splitlines() if " iteration " in line]
    assert len(lines) == 2
    own = [float.fromhex(json.loads(line)["lm_loss"]) for line in trainings.numerics("four").splitlines()]
    for line, losses in zip(lines, (own[:4], own[4:]), strict=True):
        (mean,) = map(float, printed_losses(line))
        assert mean != pytest.approx(sum(losses) / 4, rel=1e-6)
        assert mean == pytest.approx(sum(losses) / 4, rel=0.05)
        waits = re.search(r" waits of replicas \(ms\): (\S+) (\S+) (\S+) (\S+) \| slowest replica: (\d) \|$", line)
        assert waits is not None
        assert min(waits.groups()[:4], key=float) == waits[int(waits[5]) + 1]


@pytest.mark.exhaustive
def test_a_resumed_job_goes_on_like_the_one_that_saved(trainings: Trainings) -> None:
    trainings.run("whole", "first half", "second half")
    assert trainings.numerics("second half").splitlines() == trainings.numerics("whole").splitlines()[5:]


@pytest.mark.exhaustive
def test_post_validation_changes_no_digit(trainings: Trainings) -> None:
    trainings.run("validated before", "validated later")
    assert trainings.numerics("validated later") == trainings.numerics("validated before")
    assert "rollbacks:" in trainings.printed("validated later")
    # Ranks 0 and 1 are the replicas of the first stage. Iterations 1 and 2 are synchronous.
    equal = [first == second for first, second, *_ in digests(trainings, "validated later")]
    assert equal == [True, True, True, False, False, True, False, False, True, False]
