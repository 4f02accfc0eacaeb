"""Emulates the compute of a rank by sleeping for the durations of its operations.

A tensor that passes between stages begins with two times: when the tensor was sent, and when the receiver may use it.
With these times, a message can take longer than a real message on the machine (`time_comm`), and exposed communication
can be measured. `time.perf_counter` gives the same time in all processes of a machine.
"""

from __future__ import annotations

import ctypes
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.emulation.counted_memory import EmulatedMemory
from megatron.zero_bubble.runtime.communicator import TensorSpec

_PR_SET_TIMERSLACK = 29
_WAKING_UP = 60e-6
"""Seconds by which a sleep is shortened: the shortest observed time to wake up."""
_LEAD = 0.01
"""Seconds from the ranks' agreement on the start time of a step to this start time."""
_Header = ctypes.c_double * 2
"""First elements of a message: the time at which the message was sent, and the time from which the receiver may use
it."""


def sleep_precisely() -> None:
    """Make sleeps of this thread end on time; by default, Linux may lengthen each sleep by 50 microseconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def sleep_until(deadline: float) -> None:
    """Return at `deadline` (a time of `time.perf_counter`), never earlier and seldom later.

    The last sleep is shortened by the time to wake up, and a busy loop waits for the rest.
    """
    while (remaining := deadline - time.perf_counter()) > 0:
        if remaining > _WAKING_UP:
            time.sleep(remaining - _WAKING_UP)


def start_together() -> float:
    """Wait until the common start time, which rank 0 sets when all ranks are ready; return this time."""
    dist.barrier()
    start = torch.tensor([time.perf_counter() + _LEAD], dtype=torch.float64)
    dist.broadcast(start, src=0)
    sleep_until(start.item())
    return start.item()


class Emulation:
    """Emulates the compute of one rank by sleeps, and records the start of the first and the end of the last operation.

    Args:
        activation_bytes: size of the tensors between stages.
    """

    def __init__(self, activation_bytes: int) -> None:
        self.spec = TensorSpec((1, max(len(_Header()), activation_bytes // 8)), torch.float64, torch.device("cpu"))
        self.memory = EmulatedMemory()
        self.reset()

    def reset(self) -> None:
        """Delete the recorded times and the peak memory of the last step."""
        self.memory.reset()
        self.first_start = float("inf")
        self.last_end = 0.0

    def compute(self, milliseconds: float, *travels: float) -> list[torch.Tensor]:
        """Emulate an operation that takes `milliseconds`.

        Args:
            travels: for each message that the operation sends, the shortest time of the message in milliseconds.

        Returns:
            The messages.
        """
        start = time.perf_counter()
        self.first_start = min(self.first_start, start)
        messages = [self.spec.empty() for _ in travels]
        # Before the sleep and without torch: unlike computation in training, a sleep drops torch's code from the caches
        headers = [_header_of(message) for message in messages]
        sleep_until(start + milliseconds / 1e3)
        self.last_end = time.perf_counter()
        for header, travel in zip(headers, travels, strict=True):
            header[0], header[1] = self.last_end, self.last_end + travel / 1e3
        return messages


def _header_of(message: torch.Tensor) -> ctypes.Array[ctypes.c_double]:
    return _Header.from_address(message.data_ptr())


def await_arrival(message: torch.Tensor) -> float:
    """Wait until the receiver may use the message; return the time at which the message was sent."""
    sent, usable = _header_of(message)
    sleep_until(usable)
    return sent
