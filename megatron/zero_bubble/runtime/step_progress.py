"""The position of a rank in its step, which another thread may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.runtime.steps import Step


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
        # Positions are looked up in the list of begun operations: those before VALIDATE may run twice.
        done, has_begun = divmod(reached, 2)
        if done < len(self._marked):
            position = self._marked[done]
            return position, bool(has_begun) or position == self._begun == launched
        finished = self._marked[-1] if self._marked else -1
        later = (step.position for step in self._steps if step.position > finished and step.is_computation)
        return next(later, self._num_ops), False
