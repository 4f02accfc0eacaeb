"""The trainer's flags as a test changes them, checked as on one rank of a job."""

from __future__ import annotations

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


def checked_training(
    changes: dict[str, str | None], *, world_size: int, has_cuda: bool
) -> tuple[Arguments, JobSettings]:
    argv: list[str] = []
    for name, value in {**GOOD, **changes}.items():
        if value != "":
            argv += [name] if value is None else [name, *value.split(" ")]
    environment = {"RANK": "1", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "1"}
    return complete_and_check(parse_arguments(argv), environment, has_cuda)
