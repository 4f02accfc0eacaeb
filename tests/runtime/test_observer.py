from __future__ import annotations

from toy_pipeline import FakeClock

from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.recorder import StepTime
from megatron.zero_bubble.schedule import Op, OpKind


def run_step(observer: StepObserver, clock: FakeClock, step: int, *pauses: float) -> None:
    """Observe a step of one operation for each pause: the pause passes first, then the operation takes a second."""
    recorder = observer.start(step)
    for microbatch, pause in enumerate(pauses):
        clock.now += pause
        op = Op(OpKind.F, microbatch)
        recorder.begin(op)
        clock.now += 1.0
        recorder.end(op)
    observer.stop()


def test_what_a_step_recorded_is_passed_on_when_the_next_one_starts():
    clock = FakeClock()
    observer, seen = StepObserver(clock), []
    observer.sinks.append(lambda step, ops: seen.append((step, [str(m.op) for m in ops])))
    run_step(observer, clock, 1, 0.0, 0.0)
    assert seen == []
    run_step(observer, clock, 2, 0.0)
    assert seen == [(1, ["F0", "F1"])]
    observer.flush()
    assert seen == [(1, ["F0", "F1"]), (2, ["F0"])]
    observer.flush()
    assert len(seen) == 2, "each step once"


def test_a_step_that_failed_is_not_passed_on():
    clock = FakeClock()
    observer, seen = StepObserver(clock), []
    observer.sinks.append(lambda step, ops: seen.append(step))
    observer.start(1)
    observer.drop()
    run_step(observer, clock, 2, 0.0)
    observer.flush()
    assert seen == [2]


def test_every_sink_is_told():
    clock = FakeClock()
    observer, seen = StepObserver(clock), []
    observer.sinks += [lambda step, ops: seen.append("a"), lambda step, ops: seen.append("b")]
    run_step(observer, clock, 1, 0.0)
    observer.flush()
    assert seen == ["a", "b"]


def test_the_mean_step_is_over_the_steps_since_the_last_call():
    clock = FakeClock()
    observer = StepObserver(clock)
    run_step(observer, clock, 1, 0.0, 2.0)  # spans 4 s, works 2 s
    run_step(observer, clock, 2, 5.0, 0.0)  # what comes before the first operation is not in the span
    assert observer.take_mean() == StepTime(span=3.0, work=2.0)
    assert observer.take_mean() == StepTime(0.0, 0.0)
    run_step(observer, clock, 3, 0.0)
    assert observer.take_mean() == StepTime(1.0, 1.0)


def test_a_step_without_operations_counts_for_nothing():
    clock = FakeClock()
    observer = StepObserver(clock)
    run_step(observer, clock, 1)
    run_step(observer, clock, 2, 0.0)
    assert observer.take_mean() == StepTime(1.0, 1.0)


def test_the_meter_of_a_step_measures_that_step_alone():
    class Meter:
        def begin(self, op):
            pass

        def end(self, op):
            return 5

        inside = 3

    clock = FakeClock()
    observer, held = StepObserver(clock), []
    observer.sinks.append(lambda step, ops: held.append([(m.memory_change, m.inside) for m in ops]))
    recorder = observer.start(1, Meter())
    recorder.begin(Op(OpKind.F, 0))
    recorder.end(Op(OpKind.F, 0))
    run_step(observer, clock, 2, 0.0)
    observer.flush()
    assert held == [[(5, 3)], [(None, 0)]]


def test_a_step_that_runs_is_not_taken_in():
    clock = FakeClock()
    observer = StepObserver(clock)
    run_step(observer, clock, 1, 0.0)
    recorder = observer.start(2)
    recorder.begin(Op(OpKind.F, 0))
    clock.now += 5.0
    recorder.end(Op(OpKind.F, 0))
    assert observer.take_mean() == StepTime(1.0, 1.0)
    observer.stop()
    assert observer.take_mean() == StepTime(5.0, 5.0)


class SlowDevice(FakeClock):
    """A GPU that has come as far as the test says. Whoever asks for a time beyond that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.waits = 0.0, 0

    def seconds(self, marks):
        self.waits += any(mark > self.reached for mark in marks)
        return list(marks)

    def num_reached(self, marks):
        return sum(mark <= self.reached for mark in marks)


def test_between_two_steps_nothing_waits_for_the_gpu():
    """The times of a step are read during the next one, as soon as the device has finished the step."""
    clock = SlowDevice()
    observer, seen = StepObserver(clock), []
    observer.sinks.append(lambda step, ops: seen.append((step, len(ops))))
    run_step(observer, clock, 1, 0.0, 0.0)
    recorder = observer.start(2)
    for microbatch, reached in enumerate((0.5, 1.5, 2.0, 2.5)):
        op = Op(OpKind.F, microbatch)
        recorder.begin(op)
        clock.now += 1.0
        clock.reached = reached
        recorder.end(op)
        assert seen == ([(1, 2)] if reached >= 2.0 else [])
    observer.stop()
    assert clock.waits == 0
    assert observer.take_mean() == StepTime(3.0, 3.0)
    assert (clock.waits, seen) == (1, [(1, 2), (2, 4)]), "a log line is of all steps"


def test_a_gpu_that_is_ahead_has_been_read_when_the_next_step_starts():
    clock = SlowDevice()
    observer, seen = StepObserver(clock), []
    observer.sinks.append(lambda step, ops: seen.append(step))
    run_step(observer, clock, 1, 0.0)
    clock.reached = clock.now
    observer.start(2)
    assert (seen, clock.waits) == ([1], 0)


def test_the_lag_of_recorded_times_is_that_of_the_clock():
    assert StepObserver(FakeClock()).lag() == 0.25


def test_a_loop_that_never_asks_keeps_the_times_of_a_thousand_steps():
    clock = FakeClock()
    observer = StepObserver(clock)
    run_step(observer, clock, 0, 0.0, 5000.0)
    for step in range(1, 1001):
        run_step(observer, clock, step, 0.0, 2.0)
    assert observer.take_mean() == StepTime(span=4.0, work=2.0)
