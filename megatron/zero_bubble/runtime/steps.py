"""Lists the operations of one rank in execution order, and tracks which operation the executor has reached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.schedule import Op
from megatron.zero_bubble.schedule.kinds import COMMUNICATION

Range = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Makes an operation's profiler range from the operation's name."""
_NO_RANGE = contextlib.nullcontext()


def no_range(name: str) -> contextlib.AbstractContextManager[Any]:
    return _NO_RANGE


def new_range() -> Range:
    """Choose a kind of profiler range: `record_function` while torch's profiler runs, else an NVTX range on a GPU.

    NVTX ranges are for Nsight Systems, and take little time. `record_function` takes as much time as the executor's own
    work for an operation, even if torch's profiler is off.
    """
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function
    return torch.cuda.nvtx.range if torch.cuda.is_available() else no_range


class Step(NamedTuple):
    """One operation of a rank, or several operations that run as one (see `run_together`)."""

    position: int
    """Index, among all operations of the rank, of the first operation in `ops`."""
    ops: tuple[Op, ...]
    name: str
    is_computation: bool


def steps_of(groups: Iterable[tuple[Op, ...]]) -> list[Step]:
    """Return a `Step` for each group of operations that run as one."""
    steps: list[Step] = []
    position = 0
    for together in groups:
        is_computation = together[0].kind not in COMMUNICATION
        steps.append(Step(position, together, " ".join(map(str, together)), is_computation))
        position += len(together)
    return steps


class StepProgress:
    """Tracks which operation of a step an executor has reached.

    Args:
        steps: the operations in the order in which they run.
        num_ops: number of the rank's operations in the schedule.
    """

    def __init__(self, steps: Sequence[Step], num_ops: int) -> None:
        self._steps, self._num_ops = steps, num_ops
        self.position = 0
        """Index of the executor's current operation; after the last operation, the number of the rank's operations."""
        self._begun = -1
        self._marked: list[int] = []
        self._recorder: OpRecorder | None = None

    def start(self, recorder: OpRecorder | None) -> None:
        """Begin a step; `recorder` measures the step unless `recorder` is None."""
        self._recorder, self._marked, self._begun = recorder, [], -1

    def begin(self) -> None:
        """Record that the current operation has its inputs and starts to compute."""
        self._begun = self.position
        self._marked.append(self.position)

    def reached(self) -> tuple[int, bool]:
        """Return the index of the current operation, and whether its inputs have arrived. Thread-safe.

        If a recorder measures the step on a GPU, the result is the operation that the GPU has reached, because the
        process runs ahead of the GPU. The operation that the GPU has reached is never a send or receive, because a
        recorder times only computation.
        """
        launched = self.position
        reached = self._recorder.num_reached() if self._recorder is not None else None
        if reached is None:
            return launched, self._begun == launched
        # The list of begun operations gives the position, because operations before VALIDATE may run twice.
        done, has_begun = divmod(reached, 2)
        if done < len(self._marked):
            position = self._marked[done]
            return position, bool(has_begun) or position == self._begun == launched
        finished = self._marked[-1] if self._marked else -1
        later = (step.position for step in self._steps if step.position > finished and step.is_computation)
        return next(later, self._num_ops), False
