"""Decides, under post-validation, whether the next optimizer step waits for the norm of all gradients."""

from __future__ import annotations

from collections import deque

_WINDOW = 4
_TOO_OFTEN = 2


class RecentSteps:
    """The validated steps of post-validation, which predict whether the next step will be wrong.

    A correct step that does not wait for its validation saves time. A wrong step that does not wait loses about as much
    time, because the step must be amended. If at least two of the last four steps were wrong, the next step waits for
    its validation. All ranks of a pipeline record the same steps, and therefore make the same decision.
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
