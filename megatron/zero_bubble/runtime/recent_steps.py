"""Decides, under post-validation, whether the next optimizer step waits for the global gradient norm."""

from __future__ import annotations

from collections import deque


class RecentSteps:
    """Predicts from the last optimizer steps whether the next step will be wrong.

    An optimizer step is wrong if its gradients had to be clipped, or if the step had to be skipped. A correct step that
    does not wait for its validation saves time. A wrong step that does not wait for its validation must be amended, and
    loses about as much time as a correct step saves. If at least two of the last four steps were wrong, the next step
    waits for its validation. All ranks of a pipeline record the same steps, and therefore make the same decision.
    """

    def __init__(self) -> None:
        self._were_wrong: deque[bool] = deque(maxlen=4)

    def record(self, was_wrong: bool) -> None:
        """Record whether a validated optimizer step was wrong."""
        self._were_wrong.append(was_wrong)

    @property
    def next_waits(self) -> bool:
        """Whether the next optimizer step waits for its validation."""
        return sum(self._were_wrong) >= 2
