"""Records the time and the memory of each operation that a rank runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from megatron.zero_bubble.schedule import Idle, Op, OpKind
from megatron.zero_bubble.schedule.kinds import PAIRED, POST_VALIDATION


class Clock(Protocol):
    """Places marks in the computation without waiting, and later converts the marks into times in seconds."""

    def mark(self) -> Any: ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the time at which the device reached each mark; the call may wait for the device."""

    def lag(self) -> float:
        """Return the seconds by which this clock lags behind the host's clock; the call may wait for the device."""

    def num_reached(self, marks: Sequence[Any]) -> int | None:
        """Count the marks that the device has reached, without waiting; None if computation is synchronous."""


class HostClock:
    """A clock for a CPU, where computation is synchronous."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def lag(self) -> float:
        return 0.0

    def num_reached(self, marks: Sequence[float]) -> None:
        return None


class CudaClock:
    """A clock for a GPU. A mark is a CUDA event, which the process records on the current stream without waiting.

    CUDA returns the time between two events in milliseconds as a float32, whose resolution is 8 ms after a day. To keep
    a higher resolution, the clock adds up the times between successive marks in a Python float.
    """

    def __init__(self) -> None:
        self._last = self.mark()
        self._seconds = 0.0

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        if marks:
            marks[-1].synchronize()
        times = []
        for mark in marks:
            self._seconds += self._last.elapsed_time(mark) / 1000.0
            self._last = mark
            times.append(self._seconds)
        return times

    def lag(self) -> float:
        (seconds,) = self.seconds([self.mark()])
        return time.perf_counter() - seconds

    def num_reached(self, marks: Sequence[torch.cuda.Event]) -> int:
        return sum(mark.query() for mark in list(marks))


def device_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class MeasuredOp:
    """One operation that a rank ran, from `start` to `end` in seconds; the operation's inputs arrive before `start`.

    `memory_change` is the number of bytes by which the operation changed the memory in use; None if memory was not
    measured. `inside` is the operation's temporary memory in bytes: the peak of the memory in use during the operation,
    minus the larger of the memory in use before and after the operation. `exchanged` is the time in seconds for which
    experts exchanged tokens during the operation. `within` contains (kind, seconds) of each kind of work, R or W, that
    ran as a part of the operation.
    """

    op: Op
    start: float
    end: float
    memory_change: int | None = None
    inside: int = 0
    exchanged: float = 0.0
    within: tuple[tuple[OpKind, float], ...] = ()


class MemoryMeter(Protocol):
    """Measures how an operation changes the memory in use."""

    def begin(self, op: Op) -> None: ...

    def end(self, op: Op) -> int:
        """Return the change of memory since `begin`, in bytes."""

    def close(self) -> None:
        """End the measurement of an operation that failed, for which `end` is not called."""

    @property
    def inside(self) -> int:
        """Temporary memory of the last operation in bytes (see `MeasuredOp.inside`)."""


class OpRecorder:
    """Records the operations of one step; the executor calls `begin` before and `end` after each operation.

    Args:
        after_op: called after each recorded operation.
    """

    def __init__(
        self, clock: Clock, meter: MemoryMeter | None = None, after_op: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._meter = meter
        self._after_op = after_op
        self._begun: Any = None
        self._ops: list[tuple[tuple[Op, ...], int | None, int]] = []
        """Operations that ran as one, and their `MeasuredOp.memory_change` and `MeasuredOp.inside`."""
        self._marks: list[Any] = []
        self._parts: list[tuple[int, OpKind | None, Any, Any]] = []
        """(index in `_ops`, kind, start mark, end mark) of each part of an operation; see `timed_within`."""

    def begin(self, op: Op) -> None:
        """Record that the inputs of `op` have arrived and that `op` starts to compute."""
        if self._meter is not None and op.kind not in POST_VALIDATION:
            self._meter.begin(op)
        self._begun = self._clock.mark()

    def end(self, *ops: Op) -> None:
        """Record the end of one operation, or of several operations that run as one.

        On a GPU, `end` is called when the operations have been launched, and records when the GPU reaches their end.
        """
        self._marks += (self._begun, self._clock.mark())
        memory_change, inside = None, 0
        if self._meter is not None and ops[0].kind not in POST_VALIDATION:
            memory_change, inside = self._meter.end(ops[0]), self._meter.inside
            for op in ops[1:]:
                self._meter.begin(op)
                memory_change += self._meter.end(op)
        self._ops.append((ops, memory_change, inside))
        self._after_op()

    def close(self) -> None:
        """End the measurement of an operation that failed, if any; called at the end of every step."""
        if self._meter is not None:
            self._meter.close()

    def timed_exchange(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that exchanges tokens between experts, to time the function as a part of an operation."""
        return self.timed_within(None)(function)

    @contextmanager
    def timed_within(self, kind: OpKind | None) -> Iterator[None]:
        """Time a part of the current operation: work of kind `kind`, or an exchange of tokens if `kind` is None."""
        begin = self._clock.mark()
        yield
        self._parts.append((len(self._ops), kind, begin, self._clock.mark()))

    def num_reached(self) -> int | None:
        """Count the starts and ends of operations that a GPU has reached; None without a GPU. Thread-safe."""
        return self._clock.num_reached(self._marks) if self._marks else None

    def is_over(self) -> bool:
        """Return whether all recorded operations are complete."""
        return not self._marks or self._clock.num_reached(self._marks[-1:]) != 0

    def take(self) -> list[MeasuredOp]:
        """Wait until all operations recorded since the last call of `take` are complete; return these operations."""
        seconds = self._clock.seconds(self._marks)
        intervals = zip(seconds[::2], seconds[1::2], strict=True)
        parts: dict[int, dict[OpKind | None, float]] = defaultdict(lambda: defaultdict(float))
        for number, kind, *marks in self._parts:
            begin, end = self._clock.seconds(marks)
            parts[number][kind] += end - begin
        measured = [
            _with_parts(op, dict(parts[number])) if number in parts else op
            for number, ((ops, memory_change, inside), times) in enumerate(zip(self._ops, intervals, strict=True))
            for op in _share(ops, *times, memory_change, inside)
        ]
        self._ops, self._marks, self._parts = [], [], []
        return measured


def _with_parts(op: MeasuredOp, parts: dict[OpKind | None, float]) -> MeasuredOp:
    exchanged = parts.pop(None, 0.0)
    return replace(op, exchanged=exchanged, within=tuple((kind, time) for kind, time in parts.items() if kind))


def _share(ops: Sequence[Op], start: float, end: float, memory_change: int | None, inside: int) -> Iterator[MeasuredOp]:
    """Divide a duration and a change of memory equally among `ops`, which ran as one operation.

    In a pair of a forward and a backward, the backward gets the whole duration, as in a simulation, and the forward
    gets the whole change of memory.
    """
    if ops[-1].kind in PAIRED:
        forward, backward = ops
        yield MeasuredOp(forward, start, start, memory_change, inside)
        yield MeasuredOp(backward, start, end, None if memory_change is None else 0, inside)
        return
    each = (end - start) / len(ops)
    share = None if memory_change is None else round(memory_change / len(ops))
    for k, op in enumerate(ops):
        last = end if k + 1 == len(ops) else start + (k + 1) * each
        yield MeasuredOp(op, start + k * each, last, share, inside)


@dataclass(frozen=True)
class StepTime:
    """Duration of one step on one rank, in seconds."""

    span: float
    """Time from the start of the first operation to the end of the last operation."""
    work: float
    """Total time of the step's operations."""


def step_time(ops: Sequence[MeasuredOp]) -> StepTime:
    """Compute the `StepTime` of a step that ran at least one operation.

    `StepTime.span` and `StepTime.work` exclude the operations of post-validation. An operation that ran again after a
    failed validation counts as work only once.
    """
    computed = [measured for measured in ops if measured.op.kind not in POST_VALIDATION]
    latest = {measured.op: measured for measured in computed}.values()
    span = max(measured.end for measured in latest) - computed[0].start
    return StepTime(span, work=sum(measured.end - measured.start for measured in latest))


class PipelineTime(NamedTuple):
    """The duration of one step of a pipeline, and the idle share of the pipeline's ranks."""

    milliseconds: float
    """The longest `StepTime.span` of all ranks, in milliseconds."""
    idle: Idle


def idle_share(steps: Sequence[StepTime]) -> Idle:
    """Compute the idle share of a pipeline from the step times of all ranks, with the formula of `Timeline.idle`."""
    return Idle.of([step.span for step in steps], [step.work for step in steps])
