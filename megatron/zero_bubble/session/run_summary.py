"""Summarizes the measured and the predicted time of a training run in one line, printed at the end of the run."""

from __future__ import annotations

from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.runtime.recorder import PipelineTime
from megatron.zero_bubble.schedule import Idle


class RunSummary:
    """Averages the times in the log lines since the last plan.

    The first log line after planning is omitted, because its time includes the planning.

    Attributes:
        line: the text of the summary; None until the second log line after the first plan.
    """

    def __init__(self) -> None:
        self.line: str | None = None
        self._logged = 0
        """The iteration of the last log line."""
        self._reset(None, 0)

    def _reset(self, predicted: Idle | None, first: int) -> None:
        self._predicted, self._first, self._iterations = predicted, first, 0
        self._milliseconds = self._in_pipeline = self._bubble = 0.0

    def record(
        self, iteration: int, milliseconds: float, measured: PipelineTime | None, prediction: Prediction | None
    ) -> None:
        """Add the values of the log line after `iteration`: means over the iterations since the previous log line.

        Args:
            milliseconds: mean time of an iteration, the optimizer step included.
            measured: mean time and mean idle share of the pipeline in an iteration; None if no iteration was measured.
            prediction: the prediction of the plan that the iterations followed; None without a plan.
        """
        num_iterations, self._logged = iteration - self._logged, iteration
        if measured is None or prediction is None:
            return
        if prediction.idle != self._predicted:
            self._reset(prediction.idle, iteration + 1)
            return
        self._iterations += num_iterations
        self._milliseconds += num_iterations * milliseconds
        self._in_pipeline += num_iterations * measured.milliseconds
        self._bubble += num_iterations * measured.idle.bubble
        self.line = self._summary(iteration, prediction)

    def _summary(self, iteration: int, prediction: Prediction) -> str:
        sums = (self._milliseconds, self._in_pipeline, self._bubble)
        milliseconds, in_pipeline, bubble = (each / self._iterations for each in sums)
        gain = prediction.gain
        # Operations that take longer than predicted are assumed to take longer under 1F1B, too. The time outside of the
        # pipeline, such as the optimizer's time, is the same under both schedules.
        span = prediction.timeline.cost  # `in_pipeline` is the mean of the longest spans of a rank, too
        work, predicted_work = in_pipeline * (1 - bubble), span * (1 - prediction.idle.bubble)
        # In some schedules no rank is in the pipeline from the first operation to the last.
        between_spans = (prediction.time - span) * work / predicted_work
        outside = max(0.0, milliseconds - in_pipeline - between_spans)
        other = gain.times * prediction.time * work / predicted_work + outside
        line = (
            f" > iterations {self._first} to {iteration}: {milliseconds:.1f} ms each, "
            f"{in_pipeline:.1f} ms of it in the pipeline, {span:.1f} predicted; "
            f"bubble rate {bubble:.2%} measured, {prediction.idle.bubble:.2%} predicted; "
            f"{gain.over} is predicted to take {other:.1f} ms, {other / milliseconds:.3f} times as long"
        )
        if gain.is_over_other_layout and other < milliseconds:
            line += ": --zero-bubble-keep-layout keeps Megatron's split"
        return line
