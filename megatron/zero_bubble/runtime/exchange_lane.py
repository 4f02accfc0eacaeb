"""Runs the collectives of vocabulary shards one after the other, beside the computation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class PendingExchange(Protocol):
    """A collective that was submitted and may not be complete yet."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Let the computation after this call wait for the collective; raise the error that it ended with."""
        ...


class ExchangeLane(Protocol):
    """Runs what is submitted in that order, each after the computation that was launched before it."""

    def submit(self, exchange: Callable[[], None]) -> PendingExchange:
        """Start `exchange` once those before it are complete; return at once."""
        ...

    def close(self) -> None:
        """Wait for all that was submitted."""
        ...


def new_lane(device: torch.device) -> ExchangeLane:
    """The lane for exchanges of tensors on `device`."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


class ThreadLane:
    """A lane on a CPU: one thread, in which collectives block."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vocabulary exchanges")

    def submit(self, exchange: Callable[[], None]) -> PendingExchange:
        return _ThreadExchange(self._thread.submit(exchange))

    def close(self) -> None:
        self._thread.shutdown()


class _ThreadExchange:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class StreamLane:
    """A lane on a GPU: one stream, with priority over computing, because other ranks wait for the collective."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, exchange: Callable[[], None]) -> PendingExchange:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            exchange()
            end = torch.cuda.Event()
            end.record()
        return _StreamExchange(end)

    def close(self) -> None:
        self._stream.synchronize()


class _StreamExchange:
    def __init__(self, end: torch.cuda.Event) -> None:
        self._end = end

    def is_done(self) -> bool:
        return self._end.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)
