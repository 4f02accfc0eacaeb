"""A pipeline that stands still is found, and every rank says where it stands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.runtime.watchdog import Position, Stall, Watchdog
from megatron.zero_bubble.schedule import lower
from tests.runtime.toy_pipeline import FakeDevice, on_threads

TIMEOUT = 0.5
SCHEDULE = lower(generate("zb-h1", 2, 4))


class Watch:
    """Watchdogs of several ranks in one process, and what they did."""

    def __init__(self, world_size: int) -> None:
        self.store, self.world_size = dist.HashStore(), world_size
        self.stalls: list[Stall] = []
        self.left: set[int] = set()
        self.has_left = threading.Semaphore(0)
        self.dogs: list[Watchdog] = []

    def over(self, rank: int, position: Callable[[], Position | None]) -> None:
        def leave() -> None:
            self.left.add(rank)
            self.has_left.release()

        self.dogs.append(
            Watchdog(self.store, rank, self.world_size, position, TIMEOUT, self.stalls.append, leave, f"host-{rank}")
        )

    def wait_until_left(self, num_ranks: int) -> Stall:
        for _ in range(num_ranks):
            assert self.has_left.acquire(timeout=60)
        (stall,) = self.stalls
        return stall


@pytest.fixture
def watch() -> Iterator[Callable[[int], Watch]]:
    watches: list[Watch] = []

    def start(world_size: int) -> Watch:
        watches.append(Watch(world_size))
        return watches[-1]

    yield start
    for opened in watches:
        for dog in opened.dogs:
            dog.close()


AT_F2 = Position(7, 7, SCHEDULE, 0, [str(op) for op in SCHEDULE.ops[0]].index("F2"), True)


def test_a_rank_that_hangs_in_f_is_named_and_so_is_what_the_others_wait_for(watch):
    pipeline, hang = on_threads(SCHEDULE, timeout=60.0), threading.Event()
    forward = pipeline.stages[1].forward

    def forward_that_hangs(microbatch, chunk, input_tensor):
        if microbatch == 2:
            hang.wait()
        return forward(microbatch, chunk, input_tensor)

    pipeline.stages[1].forward = forward_that_hangs
    watched = watch(2)
    with ThreadPoolExecutor(2) as pool:
        steps = [
            pool.submit(executor.run, stage)
            for executor, stage in zip(pipeline.executors, pipeline.stages, strict=True)
        ]
        for rank, executor in enumerate(pipeline.executors):
            watched.over(
                rank, lambda rank=rank, executor=executor: Position(1, 1, SCHEDULE, rank, *executor.position())
            )
        stall = watched.wait_until_left(2)
        hang.set()
        for step in steps:
            step.result()
    assert watched.left == {0, 1}
    assert (stall.schedule, stall.timeout) == ("zb-h1", TIMEOUT)
    waits, computes = stall.states
    assert computes.where.startswith("computes F2, operation ")
    assert waits.where.startswith("waits for the input of B2, operation ")
    assert [state.is_computing for state in stall.states] == [False, True]
    assert "[F2]" in computes.excerpt
    assert "[B2]" in waits.excerpt
    assert [state.host for state in stall.states] == ["host-0", "host-1"]
    assert max(state.seconds for state in stall.states) >= TIMEOUT


def test_ranks_that_move_raise_no_alarm(watch):
    """A rank that is slow but finds another operation at each look does not hang."""
    watched, looks, enough = watch(1), iter(range(10**9)), threading.Event()

    def position() -> Position:
        look = next(looks)
        if look == 40:  # ten looks fit into the timeout
            enough.set()
        return replace(AT_F2, step=look)

    watched.over(0, position)
    assert enough.wait(60)
    watched.dogs[0].close()
    assert watched.stalls == []
    assert watched.left == set()


def test_between_two_steps_there_is_no_limit_but_an_answer(watch):
    """A checkpoint takes as long as it takes; a rank that hangs there is named by the others' alarm."""
    watched, asked = watch(2), threading.Semaphore(0)

    def between() -> None:
        asked.release()

    watched.over(0, between)
    for _ in range(30):
        assert asked.acquire(timeout=60)
    assert watched.stalls == []
    watched.over(1, lambda: replace(AT_F2, has_inputs=False))
    stall = watched.wait_until_left(2)
    assert stall.raised_by == 1
    assert stall.states[0].where == "is between two steps"
    assert stall.states[0].excerpt == ""


def test_a_rank_that_is_stopped_or_dead_is_reported_as_silent(watch):
    watched = watch(2)
    watched.over(0, lambda: AT_F2)
    stall = watched.wait_until_left(1)
    assert stall.states[0] is not None
    assert stall.states[1] is None


def test_the_main_threads_line_of_code_is_told(watch):
    watched = watch(1)
    watched.over(0, lambda: AT_F2)
    stall = watched.wait_until_left(1)
    assert "threading.py" in stall.states[0].line


def test_on_a_gpu_the_device_is_asked_and_not_the_process_that_runs_ahead():
    pipeline, device = on_threads(SCHEDULE), FakeDevice()
    executor = pipeline.executors[0]
    pipeline.run([OpRecorder(device), None])
    ops = [str(op) for op in SCHEDULE.ops[0]]
    computing = [str(op) for op in SCHEDULE.compute_ops(0)]
    for device.reached in range(2 * len(computing)):
        done, has_begun = divmod(device.reached, 2)
        assert executor.position() == (ops.index(computing[done]), bool(has_begun))
    device.reached = 2 * len(computing)
    assert executor.position() == (len(ops), False)


def test_a_position_in_words():
    ops = SCHEDULE.ops[0]
    assert str(AT_F2) == f"computes F2, operation {AT_F2.index + 1} of {len(ops)} in step 7"
    assert str(replace(AT_F2, has_inputs=False)).startswith("waits for the input of F2")
    send = next(index for index, op in enumerate(ops) if str(op).startswith("SEND"))
    assert str(replace(AT_F2, index=send, has_inputs=False)).startswith(f"is at {ops[send]}, operation {send + 1}")
    assert str(replace(AT_F2, index=len(ops))) == f"finishes step 7: all {len(ops)} operations have run"
    assert f"[{ops[-1]}]" in replace(AT_F2, index=len(ops)).excerpt()
