"""NCCL's rules in a job of real processes, on top of gloo: for whole trainings.

See `runtime/simulated_nccl.py` for the rules. Here a message is read by a thread of its channel, some time after it
was posted; what a reduction in the background reduces is NaN until it has been waited for.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime import communicator
from megatron.zero_bubble.runtime.process_group import Membership
from megatron.zero_bubble.runtime.process_group import connect as connect_group
from tests.runtime.simulated_nccl import LATE, NAN, Fault, SentMemory

DELAYS = (0.0, 0.001, 0.02)
"""Seconds until a message is read: each channel has one of them at most."""


@contextlib.contextmanager
def nccls_rules(seed: int) -> Iterator[None]:
    """Trainings in this process keep NCCL's rules, with delays from `seed`, or fail."""
    faults: set[str] = set()
    all_reduce = dist.all_reduce

    opened: list[LateGroup] = []

    def connect(end: Membership) -> LateGroup:
        opened.append(LateGroup(end, connect_group(end), random.Random(f"{seed} {end.name}"), faults))
        return opened[-1]

    communicator.connect_group = connect
    dist.all_reduce = partial(late_all_reduce, all_reduce)
    try:
        yield
    finally:
        communicator.connect_group, dist.all_reduce = connect_group, all_reduce
    assert opened, "the training has gone by these rules"
    if faults:
        raise Fault("; ".join(sorted(faults)))


class LateGroup:
    """One end of a channel."""

    def __init__(self, end: Membership, inner: Any, choices: random.Random, faults: set[str]) -> None:
        self._name, self._inner, self._choices, self._faults = end.name, inner, choices, faults
        self._delay = choices.choice(DELAYS)
        self._sends: queue.SimpleQueue[LateSend | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> LateSend:
        send = LateSend(tensors[0], self._choices.choice(LATE), self._choices.random() * self._delay)
        self._sends.put(send)
        return send

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> LateWork:
        arriving = torch.empty_like(tensors[0])
        return LateWork(self._inner.recv([arriving], source, tag), arriving, tensors[0])

    def shutdown(self) -> None:
        self._sends.put(None)
        self._thread.join()
        self._inner.shutdown()

    def _deliver(self) -> None:
        while (send := self._sends.get()) is not None:
            time.sleep(send.delay)
            values, is_there = send.memory.read()
            if not is_there:
                self._faults.add(f"a message of {self._name} was released before it was delivered")
            self._inner.send([values], 1, 0).wait()
            send.delivered.set()


class LateSend:
    """A message that is read later."""

    def __init__(self, tensor: torch.Tensor, num_late: int, delay: float) -> None:
        self.memory, self.delay = SentMemory(tensor), delay
        self.delivered = threading.Event()
        self._num_late = num_late

    def is_completed(self) -> bool:
        if self.delivered.is_set() and self._num_late > 0:
            self._num_late -= 1
            return False
        return self.delivered.is_set()

    def wait(self) -> None:
        self.delivered.wait()


class LateWork:
    """A result that is not there until it has been waited for."""

    def __init__(self, work: dist.Work, result: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._result, self._target = work, result, target.fill_(NAN)

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._result)


def late_all_reduce(all_reduce: Any, tensor: torch.Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
    if not async_op:
        return all_reduce(tensor, *args, **options)
    result = tensor.clone()
    return LateWork(all_reduce(result, *args, async_op=True, **options), result, tensor)
