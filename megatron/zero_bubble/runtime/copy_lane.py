"""Copies tensors between a device and host memory in the background."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import NamedTuple, Protocol

import torch


class CopyPair(NamedTuple):
    """The source tensor of a copy, and a target tensor of the same size."""

    source: torch.Tensor
    target: torch.Tensor


class PendingCopy(Protocol):
    """Queued copies between a device and host memory, which may not have ended yet."""

    def wait(self) -> None:
        """Make all later computation of this process wait until these queued copies have ended."""

    def seconds(self) -> float:
        """Wait until these queued copies have ended, and return how many seconds the copies took."""


class CopyLane(Protocol):
    """Runs copies in the background, in the order in which the copies are queued."""

    def start(self, pairs: Sequence[CopyPair]) -> PendingCopy:
        """Queue copies, which begin when all computation launched so far is complete."""

    def host_tensor(self, num_bytes: int) -> torch.Tensor:
        """Allocate a byte tensor in host memory."""


class ThreadLink:
    """Emulates the host link of a GPU on a CPU: one thread copies tensors within host memory.

    Args:
        bytes_per_second: the rate of the emulated link; None lets the thread copy at full speed.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._bytes_per_second = bytes_per_second
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-link")

    def start(self, pairs: Sequence[CopyPair]) -> PendingCopy:
        return _ThreadCopy(self._thread.submit(self._copy, list(pairs)))

    def host_tensor(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def _copy(self, pairs: list[CopyPair]) -> float:
        start = time.perf_counter()
        for source, target in pairs:
            target.copy_(source)
        if self._bytes_per_second is not None:
            least = sum(source.nbytes for source, _ in pairs) / self._bytes_per_second
            time.sleep(max(0.0, start + least - time.perf_counter()))
        pairs.clear()  # the thread must hold no tensor once `wait` has returned, because D frees the source
        return time.perf_counter() - start


class _ThreadCopy(NamedTuple):
    future: Future[float]

    def wait(self) -> None:
        self.future.result()

    def seconds(self) -> float:
        return self.future.result()


class StreamLink:
    """The host link of a CUDA device: a separate stream, and pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, pairs: Sequence[CopyPair]) -> PendingCopy:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            end.record()
        return _StreamCopy(begin, end)

    def host_tensor(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _StreamCopy(NamedTuple):
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.end)

    def seconds(self) -> float:
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1000.0


def copy_lane(device: torch.device) -> CopyLane:
    """Return the host link of `device`."""
    return StreamLink(device) if device.type == "cuda" else ThreadLink()


def link_rate(lane: CopyLane, device: torch.device) -> float:
    """Measure the bandwidth of a host link in its slower direction, in bytes per millisecond."""
    num_bytes = 2**24
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    on_host = lane.host_tensor(num_bytes)
    copies = [CopyPair(on_device, on_host), CopyPair(on_host, on_device)]
    seconds = median(max(lane.start([copy]).seconds() for copy in copies) for _ in range(5))
    return num_bytes / seconds / 1000.0


class HostBuffers:
    """Allocates buffers in host memory, and reuses free buffers for later copies.

    The size of a buffer is a power of two; torch rounds the size of pinned memory up in the same way. Tensors whose
    sizes vary from step to step, such as the activations of experts, therefore share buffers of a few sizes.
    `HostBuffers.num_bytes` is the total size of all buffers. A copy may reuse a buffer as soon as `give_back` has freed
    the buffer, because queued copies run in order.
    """

    def __init__(self, lane: CopyLane) -> None:
        self._lane = lane
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of at least `num_bytes` bytes in host memory.

        Raises:
            HostMemoryError: the host has no memory for the buffer.
        """
        size = 1 << (num_bytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        try:
            buffer = self._lane.host_tensor(size)
        except (RuntimeError, MemoryError) as error:
            raise HostMemoryError(
                f"the host has no room for {size} more bytes of activations, beside {self.num_bytes}: "
                "raise --zero-bubble-memory-limit, or give --zero-bubble-offload off"
            ) from error
        self.num_bytes += size
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free[buffer.nbytes].append(buffer)


class HostMemoryError(RuntimeError):
    """Raised if the host has no memory for activations that a schedule copies to the host."""
