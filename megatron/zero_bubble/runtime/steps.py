"""The operations of one rank as the executor walks them, and the profiler ranges around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.schedule import Op
from megatron.zero_bubble.schedule.kinds import COMMUNICATION

Range = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Makes the profiler range of an operation from its name."""
_NO_RANGE = contextlib.nullcontext()


def no_range(name: str) -> contextlib.AbstractContextManager[Any]:
    return _NO_RANGE


def new_range() -> Range:
    """Choose the kind of profiler range: torch's while its profiler runs, else NVTX on a GPU, for Nsight Systems.

    torch's range takes as much time as the rest of the executor, whether or not its profiler runs. NVTX's takes none.
    """
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function
    return torch.cuda.nvtx.range if torch.cuda.is_available() else no_range


class Step(NamedTuple):
    """One operation of a rank, or several that run as one (see `run_together`)."""

    position: int
    """Index of the first operation among those of its rank."""
    ops: tuple[Op, ...]
    name: str
    is_computation: bool


def steps_of(groups: Iterable[tuple[Op, ...]]) -> list[Step]:
    """Return the steps of groups of operations that run as one, in their order."""
    steps: list[Step] = []
    position = 0
    for together in groups:
        is_computation = together[0].kind not in COMMUNICATION
        steps.append(Step(position, together, " ".join(map(str, together)), is_computation))
        position += len(together)
    return steps
