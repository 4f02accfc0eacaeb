"""Detects a hung pipeline, and reports the current operation of each rank.

A hung rank reports nothing, and its neighbours wait for messages from the hung rank. To detect a hung rank, each rank
has a thread that regularly checks whether the rank has advanced to another operation. The first thread whose rank has
not advanced within the timeout raises an alarm in the job's store. After an alarm, every rank writes its current
operation to the store. The rank that raised the alarm reports the operations of all ranks, and then all ranks exit.
Each check by a thread costs one small request to the store.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.schedule import Schedule
from megatron.zero_bubble.schedule.kinds import COMMUNICATION


@dataclass(frozen=True)
class Position:
    """Position of a rank in a step: at operation number `index` of the rank, or after the last operation."""

    call: int
    """Number of calls of the forward-backward function so far, for training steps and for evaluations."""
    step: int
    """Number of training steps begun since the job's start."""
    schedule: Schedule
    pipeline_rank: int
    index: int
    has_inputs: bool
    """Whether the operation's inputs from other ranks have arrived."""

    def __str__(self) -> str:
        ops = self.schedule.ops[self.pipeline_rank]
        if self.index == len(ops):
            return f"finishes step {self.step}: all {len(ops)} operations have run"
        op = ops[self.index]
        verb = "computes" if self.has_inputs else ("is at" if op.kind in COMMUNICATION else "waits for the input of")
        return f"{verb} {op}, operation {self.index + 1} of {len(ops)} in step {self.step}"

    def excerpt(self) -> str:
        """List the operations around the position, with the current operation in brackets."""
        ops = self.schedule.ops[self.pipeline_rank]
        return self.schedule.excerpt(self.pipeline_rank, min(self.index, len(ops) - 1), radius=3)


@dataclass(frozen=True)
class RankState:
    """The state of a rank, which the rank writes to the store after an alarm."""

    rank: int
    host: str
    pid: int
    seconds: float
    """Seconds since the rank was last seen to advance."""
    where: str
    """The rank's `Position` in words."""
    excerpt: str
    """The operations around the rank's position in the schedule; empty between two steps."""
    line: str
    """The line of code that the rank's watched thread executes."""
    is_computing: bool


@dataclass(frozen=True)
class Stall:
    """Describes a hung pipeline: the rank that raised the alarm, and the state of each rank that answered."""

    schedule: str
    timeout: float
    raised_by: int
    states: tuple[RankState | None, ...]
    """State of each rank; None if the rank did not answer."""


class Watchdog:
    """Watches one rank of a job in a background thread, until `close` is called.

    Args:
        store: the job's store, to which the watchdog opens a separate connection. All ranks must create their watchdogs
            in the same order.
        position: returns the position of this rank, or None between two steps; called in the watchdog's thread.
        timeout: seconds that a rank may spend at one operation before the watchdog raises an alarm.
        report: reports a hung pipeline; called only on the rank that was the first to raise an alarm.
        leave: called on every rank after a hung pipeline has been reported. `leave` should end the process, because a
            hung rank cannot exit on its own.
        host: name of this rank's machine.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        position: Callable[[], Position | None],
        timeout: float,
        report: Callable[[Stall], None],
        leave: Callable[[], None],
        host: str,
    ) -> None:
        # A connection to the store is busy while its owner waits for a key. Before torch 2.8, a store has only one
        # connection; the watchdog may share this connection, because no step waits for a key.
        connection = store.clone() if hasattr(store, "clone") else store
        generation = connection.add(f"megatron.zero_bubble/watchdogs of {rank}", 1)
        self._store = dist.PrefixStore(f"megatron.zero_bubble/watchdog/{generation}", connection)
        self._rank, self._world_size = rank, world_size
        self._position, self._timeout = position, timeout
        self._report, self._leave = report, leave
        self._host, self._device = host, own_device()
        self._pause = min(5.0, timeout / 10)
        """Seconds between two checks; a report waits for the other ranks for at most `2 * _pause + 1` seconds."""
        self._seen: Position | None = None
        self._seen_at = time.monotonic()
        self._closed = threading.Event()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="pipeline watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching the rank."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while not self._closed.wait(self._pause):
                position = self._position()
                if position != self._seen:
                    self._seen, self._seen_at = position, time.monotonic()
                is_late = position is not None and time.monotonic() - self._seen_at > self._timeout
                raises_alarm = is_late and self._store.add("alarms", 1) == 1
                if self._store.check(["alarms"]):
                    self._publish()
                    if raises_alarm:
                        self._report_states()
                    deadline = time.monotonic() + 4 * self._pause + 2.0
                    while time.monotonic() < deadline and not self._store.check(["reported"]):
                        time.sleep(0.05)
                    self._leave()
                    return
        except dist.DistError:
            # The store is gone, because the launcher is ending the job.
            return

    def _report_states(self) -> None:
        """Wait for the states of all ranks, report the states, and then allow the ranks to exit."""
        assert self._seen is not None
        deadline = time.monotonic() + 2 * self._pause + 1.0
        ranks = range(self._world_size)
        while time.monotonic() < deadline and int(self._store.add("answers", 0)) < self._world_size:
            time.sleep(0.05)
        answers = [self._store.get(f"{rank}") if self._store.check([f"{rank}"]) else None for rank in ranks]
        states = tuple(None if answer is None else RankState(**json.loads(answer)) for answer in answers)
        self._report(Stall(self._seen.schedule.name, self._timeout, self._rank, states))
        self._store.set("reported", "")

    def _publish(self) -> None:
        position = self._seen
        state = RankState(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            seconds=time.monotonic() - self._seen_at,
            where=str(position) if position is not None else "is between two steps",
            excerpt=position.excerpt() if position is not None else "",
            line=_line_of(sys._current_frames().get(self._watched)),
            is_computing=position is not None and position.has_inputs,
        )
        self._store.set(f"{self._rank}", json.dumps(asdict(state)))
        self._store.add("answers", 1)


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame, limit=1)[-1]
    return f"{innermost.name}, {os.path.basename(innermost.filename)}:{innermost.lineno}"
