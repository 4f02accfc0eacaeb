"""Sums a training up in one line: time of an iteration, measured and predicted bubble, and the predicted gain."""

from __future__ import annotations

from megatron.zero_bubble.planner.prediction import Gain
from megatron.zero_bubble.schedule import Idle


class RunSummary:
    """Averages the log lines since the schedule was planned, of which the first is left out: planning is in its time.

    Attributes:
        line: the summary, None as long as there is nothing to tell.
    """

    def __init__(self) -> None:
        self.line: str | None = None
        self._predicted: Idle | None = None
        self._first = self._iterations = 0
        self._seconds = self._bubble = 0.0

    def record(
        self,
        iteration: int,
        num_iterations: int,
        seconds: float,
        measured: Idle | None,
        predicted: Idle | None,
        gain: Gain | None,
    ) -> None:
        """Take in a log line of `num_iterations` iterations up to `iteration`; `seconds` is the mean time of one."""
        if measured is None or predicted is None or gain is None:
            return
        if predicted != self._predicted:
            self._predicted, self._first = predicted, iteration + 1
            self._iterations, self._seconds, self._bubble = 0, 0.0, 0.0
            return
        self._iterations += num_iterations
        self._seconds += num_iterations * seconds
        self._bubble += num_iterations * measured.bubble
        milliseconds = self._seconds / self._iterations * 1000
        self.line = (
            f" > iterations {self._first} to {iteration}: {milliseconds:.1f} ms each; "
            f"bubble rate {self._bubble / self._iterations:.2%} measured, {predicted.bubble:.2%} predicted; "
            f"predicted to be {gain}"
        )
        # Operations that take longer than when they were measured would do so under 1F1B, too.
        with_bubble = gain.times * (1 - self._bubble / self._iterations) / (1 - predicted.bubble)
        if gain.is_over_other_layout and with_bubble < 1:
            self.line += (
                f"; but with the measured bubble it is {with_bubble:.3f} times as fast: "
                "--zero-bubble-keep-layout keeps Megatron's split"
            )
