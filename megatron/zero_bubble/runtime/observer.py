"""Watches the steps of one rank: how long they take, and who else wants to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.zero_bubble.runtime.timeline import Clock, MeasuredOp, MemoryMeter, OpRecorder, StepTime, step_time

Sink = Callable[[int, Sequence[MeasuredOp]], None]
"""Gets the number of a step and its operations."""


class StepObserver:
    """Gives the executor a recorder for every training step and passes on what was recorded.

    On a GPU what a step recorded is read when the next one starts, when it has long been computed:
    nothing waits for it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recorder: OpRecorder | None = None
        self._step = 0
        self._is_running = False
        self._times: list[StepTime] = []
        self.sinks: list[Sink] = []

    def start(self, step: int, meter: MemoryMeter | None = None) -> OpRecorder:
        """The recorder for `step`; `meter` measures memory too."""
        self.stop()
        self.flush()
        self._step, self._is_running = step, True
        self._recorder = OpRecorder(self._clock, meter)
        return self._recorder

    def stop(self) -> None:
        """The step that was started has ended."""
        self._is_running = False

    def flush(self) -> None:
        """Take in the steps that have ended."""
        ops = self._recorder.take() if self._recorder is not None and not self._is_running else []
        if ops:
            self._times.append(step_time(ops))
            for sink in self.sinks:
                sink(self._step, ops)

    def take_mean(self) -> StepTime:
        """The mean step since the last call; all zeros if there was none."""
        self.flush()
        times, self._times = self._times, []
        count = max(1, len(times))
        return StepTime(sum(time.span for time in times) / count, sum(time.work for time in times) / count)
