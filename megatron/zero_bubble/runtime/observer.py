"""Collects the measured operations of each step on one rank, and passes the operations to registered functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from megatron.zero_bubble.runtime.recorder import Clock, MeasuredOp, MemoryMeter, OpRecorder, StepTime, step_time

_MOST_STEPS = 1000
"""Largest number of steps whose times are kept until the next call of `StepObserver.take_mean`."""


class StepObserver:
    """Gives the executor a recorder for every training step, and passes the step's measured operations to `sinks`.

    A GPU executes operations some time after the process has launched the operations. If the process waited for the
    GPU between two steps, the GPU would idle. The observer therefore reads the times of a step during the next step:
    after each operation, the observer checks whether the GPU has finished the previous step.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: tuple[int, OpRecorder] | None = None
        self._ended: deque[tuple[int, OpRecorder]] = deque()
        self._times: deque[StepTime] = deque(maxlen=_MOST_STEPS)
        self.sinks: list[Callable[[int, Sequence[MeasuredOp]], None]] = []
        """Functions that are called with the number of each step and the measured operations of the step."""

    def start(self, step: int, meter: MemoryMeter | None = None) -> OpRecorder:
        """Return the recorder for `step`; with a `meter`, the recorder also measures memory."""
        self.stop()
        self._take_finished()
        recorder = OpRecorder(self._clock, meter, self._take_finished)
        self._running = step, recorder
        return recorder

    def stop(self) -> None:
        """Record that the current step has ended."""
        if self._running is not None:
            self._ended.append(self._running)
            self._running = None

    def drop(self) -> None:
        """Discard the current step if it has not ended, because the step has failed."""
        self._running = None

    def flush(self) -> None:
        """Wait until the GPU has finished all ended steps, and pass the operations of these steps to the sinks."""
        while self._ended:
            self._take()

    def take_mean(self) -> StepTime:
        """Wait for the GPU; return the mean `StepTime` of the steps since the last call (zeros if there are none).

        The mean is over at most the last 1000 steps.
        """
        self.flush()
        times, count = self._times, max(1, len(self._times))
        mean = StepTime(sum(time.span for time in times) / count, sum(time.work for time in times) / count)
        times.clear()
        return mean

    def lag(self) -> float:
        """Wait for the GPU, and return the seconds by which recorded times lag behind the host's monotonic clock."""
        self.flush()
        return self._clock.lag()

    def _take_finished(self) -> None:
        while self._ended and self._ended[0][1].is_over():
            self._take()

    def _take(self) -> None:
        step, recorder = self._ended.popleft()
        ops = recorder.take()
        if ops:
            self._times.append(step_time(ops))
            for sink in self.sinks:
                sink(step, ops)
