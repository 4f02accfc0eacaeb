"""The operations of one rank as the executor walks them, the profiler ranges around them, and how far it has come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.runtime.recorder import OpRecorder
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
    """Index of the first operation in the rank's operations."""
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


class StepProgress:
    """Follows an executor through the operations of a step.

    Args:
        steps: the operations in the order in which they run.
        num_ops: their number.
    """

    def __init__(self, steps: Sequence[Step], num_ops: int) -> None:
        self._steps, self._num_ops = steps, num_ops
        self.position = 0
        """Index of the operation that the executor is at; the number of operations once all have run."""
        self._begun = -1
        self._marked: list[int] = []
        self._recorder: OpRecorder | None = None

    def start(self, recorder: OpRecorder | None) -> None:
        """Begin a step, which `recorder` measures."""
        self._recorder, self._marked, self._begun = recorder, [], -1

    def begin(self) -> None:
        """Note that the inputs of the operation are there, and it starts to compute."""
        self._begun = self.position
        self._marked.append(self.position)

    def reached(self) -> tuple[int, bool]:
        """Return the index of the operation this rank is at, and whether its inputs are there; any thread may ask.

        If a recorder measures the step on a GPU, the answer is the GPU's position, because the process runs ahead of
        it; it is then never a communication operation.
        """
        launched = self.position
        reached = self._recorder.num_reached() if self._recorder is not None else None
        if reached is None:
            return launched, self._begun == launched
        # Positions are looked up in the list of begun operations: operations before VALIDATE may run twice.
        done, has_begun = divmod(reached, 2)
        if done < len(self._marked):
            position = self._marked[done]
            return position, bool(has_begun) or position == self._begun == launched
        finished = self._marked[-1] if self._marked else -1
        later = (step.position for step in self._steps if step.position > finished and step.is_computation)
        return next(later, self._num_ops), False
