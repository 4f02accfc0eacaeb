"""Decides, under post-validation, whether the next optimizer step waits for the norm of all gradients."""

from __future__ import annotations

from collections import deque

_WINDOW = 4
_TOO_OFTEN = 2


class RecentSteps:
    """The validated steps of post-validation, which predict whether the next step will be wrong.

    If an optimizer step does not wait for its validation, a correct step saves about as much time as amending a wrong
    step takes. A step that waits for its validation neither saves nor loses time. If at least two of the last four
    steps were wrong, the next step waits. All ranks of a pipeline record the same steps, and therefore make the same
    decision.
    """

    def __init__(self) -> None:
        self._were_wrong: deque[bool] = deque(maxlen=_WINDOW)

    def record(self, was_wrong: bool) -> None:
        """Record whether a validated step was wrong: whether its gradients had to be clipped, or the step skipped."""
        self._were_wrong.append(was_wrong)

    @property
    def next_waits(self) -> bool:
        """Whether the next optimizer step waits for its validation."""
        return sum(self._were_wrong) >= _TOO_OFTEN
