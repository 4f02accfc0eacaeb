"""The trainer's flags as a test changes them, checked and planned as on one rank of a job."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.zero_bubble.session.plans import make_schedules
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check

GOOD = {
    "--num-layers": "8", "--hidden-size": "64", "--num-attention-heads": "4", "--seq-length": "32",
    "--micro-batch-size": "2", "--train-iters": "10", "--lr": "1e-3",
    "--pipeline-model-parallel-size": "4", "--mock-data": None, "--vocab-size": "100",
}  # fmt: skip


def checked(changes: dict[str, str | None], *, world_size: int = 4, has_cuda: bool = False) -> Arguments:
    """The flags GOOD with these changes (a value of "" drops the flag), checked as one of `world_size` ranks."""
    return checked_training(changes, world_size=world_size, has_cuda=has_cuda)[0]


def checked_job(changes: dict[str, str | None], *, world_size: int = 4, has_cuda: bool = False) -> JobSettings:
    """The job that these flags ask for."""
    return checked_training(changes, world_size=world_size, has_cuda=has_cuda)[1]


def refusal(changes: dict[str, str | None]) -> str:
    """The one line with which these flags are refused."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked(changes)
    return str(error.value)


def checked_training(
    changes: dict[str, str | None], *, world_size: int, has_cuda: bool
) -> tuple[Arguments, JobSettings]:
    argv: list[str] = []
    for name, value in {**GOOD, **changes}.items():
        if value != "":
            argv += [name] if value is None else [name, *value.split(" ")]
    environment = {"RANK": "1", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "1"}
    args, job = complete_and_check(parse_arguments(argv), environment, has_cuda)
    if job.plan is not None and not job.is_layout_open:
        make_schedules(job.flags, job.plan)
    return args, job


def data_flags(**settings: Any) -> Arguments:
    """Flags of data and batches by name, beside those of some model; nothing is evaluated unless they say so."""
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "lr": 0.1, "eval_iters": 0}
    return Arguments(**{**model, **settings})
