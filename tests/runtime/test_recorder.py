from __future__ import annotations

import struct
import time
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.recorder import (
    HostClock,
    MeasuredOp,
    OpRecorder,
    StepTime,
    device_clock,
    idle_share,
    step_time,
)
from megatron.zero_bubble.schedule import Op, OpKind, StageCosts, simulate

F0, B0 = Op(OpKind.F, 0), Op(OpKind.B, 0)


class FakeClock:
    """A clock that counts its marks; the time of a mark is ten times its number, and is read only when asked for."""

    def __init__(self) -> None:
        self.marks = 0
        self.asked = 0

    def mark(self):
        self.marks += 1
        return self.marks

    def seconds(self, marks):
        self.asked += 1
        return [10.0 * mark for mark in marks]


class FakeMeter:
    """Notes how many marks the clock has made when it is called."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.calls: list[tuple[str, int]] = []

    def begin(self, op):
        self.calls.append((f"begin {op}", self.clock.marks))

    def end(self, op):
        self.calls.append((f"end {op}", self.clock.marks))
        return 7

    def close(self):
        self.calls.append(("close", self.clock.marks))

    inside = 2


def test_operations_that_run_as_one_get_equal_shares():
    clock = FakeClock()
    meter = FakeMeter(clock)
    recorder = OpRecorder(clock, meter)
    tail = tuple(Op(OpKind.W, microbatch) for microbatch in (2, 3))
    recorder.begin(tail[0])
    recorder.end(*tail)
    assert recorder.take() == [MeasuredOp(tail[0], 10.0, 15.0, 7, 2), MeasuredOp(tail[1], 15.0, 20.0, 7, 2)]
    assert [call for call, _ in meter.calls] == ["begin W2", "end W2", "begin W3", "end W3"]


def test_a_recorder_that_is_closed_closes_its_meter():
    clock = FakeClock()
    meter = FakeMeter(clock)
    recorder = OpRecorder(clock, meter)
    recorder.begin(Op(OpKind.F, 0))
    recorder.close()
    assert [call for call, _ in meter.calls] == ["begin F0", "close"]


def test_the_backward_of_a_pair_gets_all_of_its_time():
    forward, backward = Op(OpKind.F, 2), Op(OpKind.PB, 0)
    recorder = OpRecorder(FakeClock())
    recorder.begin(forward)
    recorder.end(forward, backward)
    assert recorder.take() == [MeasuredOp(forward, 10.0, 10.0), MeasuredOp(backward, 10.0, 20.0)]


def test_exchanges_are_timed_within_their_operation():
    recorder = OpRecorder(FakeClock())
    exchange = recorder.timed_exchange(lambda value: value + 1)
    for op, number in ((F0, 2), (B0, 0)):
        recorder.begin(op)
        assert [exchange(value) for value in range(number)] == list(range(1, number + 1))
        recorder.end(op)
    assert recorder.take() == [MeasuredOp(F0, 10.0, 60.0, exchanged=20.0), MeasuredOp(B0, 70.0, 80.0)]
    assert recorder.take() == [], "once"


def test_a_recorder_keeps_when_each_operation_ran():
    clock = FakeClock()
    recorder = OpRecorder(clock)
    for op in (F0, B0):
        recorder.begin(op)
        recorder.end(op)
    assert clock.asked == 0, "the clock is read when the step is over"
    assert recorder.take() == [MeasuredOp(F0, 10.0, 20.0), MeasuredOp(B0, 30.0, 40.0)]
    assert recorder.take() == [], "once"


def test_an_operation_begins_when_its_inputs_are_there():
    recorder = OpRecorder(FakeClock())
    recorder.begin(F0)
    recorder.begin(F0)
    recorder.end(F0)
    assert recorder.take() == [MeasuredOp(F0, 20.0, 30.0)]


def test_a_meter_is_asked_outside_of_the_measured_time():
    clock = FakeClock()
    meter = FakeMeter(clock)
    recorder = OpRecorder(clock, meter)
    recorder.begin(F0)
    recorder.end(F0)
    assert meter.calls == [("begin F0", 0), ("end F0", 2)]
    assert recorder.take() == [MeasuredOp(F0, 10.0, 20.0, memory_change=7, inside=2)]


def test_the_clock_of_a_cpu_is_the_hosts():
    clock = device_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    first, second = clock.seconds([clock.mark(), clock.mark()])
    assert 0 <= second - first < 1.0


class Event:
    """A stand-in for CUDA's events: the time between two is a float32 of milliseconds."""

    now = 0.0
    """The time of the device, in seconds."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.seconds = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return struct.unpack("f", struct.pack("f", (other.seconds - self.seconds) * 1000.0))[0]


@pytest.mark.parametrize("hours", [24, 7 * 24])
def test_the_clock_of_a_gpu_keeps_its_resolution(monkeypatch, hours):
    """Steps of six operations of two seconds, once an hour an evaluation; the device's clock is off by 5 ppm."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: Event.now * (1 + 5e-6))
    clock = device_clock(torch.device("cuda"))
    last = Event.now + hours * 3600
    while Event.now < last:
        marks, times = [], []
        for _ in range(7):
            marks.append(clock.mark())
            times.append(Event.now)
            Event.now += 2.0001
        seconds = clock.seconds(marks)
        assert all(abs(end - start - 2.0001) < 1e-6 for start, end in pairwise(seconds))
        Event.now += 300.0 if Event.now % 3600 < 14 else 0.1
    lag = clock.lag()
    assert [at + lag for at in seconds] == pytest.approx([at * (1 + 5e-6) for at in times], abs=0.005)


def test_a_step_spans_its_operations_and_waiting_is_no_work():
    ops = [MeasuredOp(F0, 5.0, 6.0), MeasuredOp(B0, 9.0, 11.0)]
    assert step_time(ops) == StepTime(span=6.0, work=3.0)


def test_a_step_begins_after_the_last_steps_validation():
    """A rank that validates the last step before its first forward waits for other ranks; `Timeline.spans` agree."""
    ops = [
        MeasuredOp(Op(OpKind.VALIDATE, 0), 0.0, 4.0),
        MeasuredOp(F0, 5.0, 6.0),
        MeasuredOp(B0, 9.0, 11.0),
        MeasuredOp(Op(OpKind.STEP, 0), 11.0, 12.0),
    ]
    assert step_time(ops) == StepTime(span=6.0, work=3.0)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "interleaved-1f1b"])
def test_the_idle_share_is_that_of_simulate(name):
    """The stages are uneven, so that bubble rate and imbalance are compared apart."""
    schedule = generate(name, 4, 8)
    stages = schedule.num_stages
    costs = StageCosts(
        *(tuple(1.0 + 0.25 * ((s + k) % 3) + 0.125 * s for s in range(stages)) for k in range(3)),
        (0.125,) * (stages - 1),
        *((0.0,) * stages,) * 3,
    )
    timeline = simulate(schedule, costs)
    steps = [step_time([MeasuredOp(*timed) for timed in lane]) for lane in timeline.lanes]
    assert asdict(idle_share(steps)) == pytest.approx(asdict(timeline.idle), rel=1e-12)
    assert timeline.idle.imbalance > 0.03


def test_a_run_without_steps_has_no_bubble():
    assert idle_share([StepTime(0.0, 0.0)] * 2).total == 0
