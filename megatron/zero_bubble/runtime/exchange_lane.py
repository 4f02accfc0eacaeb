"""Runs the collectives of vocabulary shards one after the other, in parallel with the computation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from megatron.zero_bubble.schedule import Op, Schedule
from megatron.zero_bubble.schedule.graph import exchange_before
from megatron.zero_bubble.schedule.kinds import COLLECTIVES

_logger = logging.getLogger(__name__)


class PendingExchange(Protocol):
    """A collective that was submitted and may not be complete yet."""

    def failure(self) -> BaseException | None:
        """Return the error of the submitted collective without waiting; None if the collective has not failed."""

    def wait(self) -> None:
        """Make all later computation wait for the submitted collective; if it has failed, raise its error."""


class ExchangeLane(Protocol):
    """Runs collectives in the order in which they are submitted, without autograd.

    A collective starts after all computation that was launched before the collective was submitted.
    """

    @property
    def waits_in_thread(self) -> bool:
        """Whether a submitted collective waits for other ranks without delaying computation."""

    def submit(self, exchange: Callable[[], None]) -> PendingExchange:
        """Queue the function `exchange` to run after all collectives submitted earlier; return at once."""

    def close(self) -> None:
        """Wait for all submitted collectives; no collective may be submitted afterwards."""


def new_lane(device: torch.device, leave: Callable[[], None]) -> ExchangeLane:
    """Return an `ExchangeLane` for tensors on `device`; the function `leave` leaves the collectives' process groups."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane(leave)


class ThreadLane:
    """An `ExchangeLane` for a CPU: one thread runs the collectives, and blocks until each collective is complete.

    After a collective has failed on this rank, the thread runs no later collective, because this rank and the other
    ranks would otherwise run different collectives at the same time. After a failure, the rank leaves the process
    groups of the collectives, so that no other rank waits for this rank. The thread logs a collective's error
    immediately, because the main thread may be waiting for another rank.

    Args:
        leave: function that leaves the process groups of the collectives (`Collectives.close`).
    """

    waits_in_thread = True

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._submitted: SimpleQueue[_ThreadExchange | None] = SimpleQueue()
        # A daemon, so that a rank whose computation has failed exits even if its lane still waits for other ranks.
        self._thread = threading.Thread(target=self._run, name="vocabulary exchanges", daemon=True)
        self._thread.start()

    def submit(self, exchange: Callable[[], None]) -> PendingExchange:
        pending = _ThreadExchange(exchange, Future())
        self._submitted.put(pending)
        return pending

    def close(self) -> None:
        self._submitted.put(None)
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        failure: BaseException | None = None
        while (pending := self._submitted.get()) is not None:
            try:
                if failure is None:
                    pending.exchange()
            except Exception as error:
                _logger.error("a collective of the vocabulary shards failed: %s: %s", type(error).__name__, error)
                self._leave()
                failure = error
            if failure is None:
                pending.end.set_result(None)
            else:
                pending.end.set_exception(failure)
            del pending  # a waiting thread would keep the tensors of the last collective, and the model


class _ThreadExchange(NamedTuple):
    exchange: Callable[[], None]
    end: Future[None]

    def failure(self) -> BaseException | None:
        return self.end.exception() if self.end.done() else None

    def wait(self) -> None:
        self.end.result()


class StreamLane:
    """An `ExchangeLane` for a GPU: a stream with priority over computation, because other ranks wait for collectives.

    On a GPU, a collective occupies multiprocessors while waiting for other ranks. With one hardware queue, a waiting
    collective also delays all work that is launched after the collective.
    """

    waits_in_thread = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    @torch.no_grad()
    def submit(self, exchange: Callable[[], None]) -> PendingExchange:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            exchange()
            end = torch.cuda.Event()
            end.record()
        return _StreamExchange(end)

    def close(self) -> None:
        self._stream.synchronize()


class _StreamExchange(NamedTuple):
    end: torch.cuda.Event

    def failure(self) -> None:
        return None

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.end)


class Exchanges:
    """The collectives that one rank has started and that no operation has waited for yet.

    Args:
        schedule: determines which operation of the rank waits for which collective.
        rank: this process's pipeline rank.
        lane: runs the collectives; None if the schedule has no collectives.
    """

    def __init__(self, schedule: Schedule, rank: int, lane: ExchangeLane | None) -> None:
        self._schedule, self._rank, self._lane = schedule, rank, lane
        self._pending: dict[Op, PendingExchange] = {}

    def start(self, op: Op, exchange: Callable[[], None]) -> None:
        """Queue the function `exchange`, which runs the collective `op` while this rank computes; return at once."""
        assert self._lane is not None, f"{op} needs a lane for exchanges"
        self._pending[op] = self._lane.submit(exchange)

    def wait_before(self, op: Op) -> None:
        """If a collective produces the input of `op`, wait for this collective."""
        exchange = exchange_before(self._schedule, self._rank, op)
        if exchange is not None:
            self._pending.pop(exchange).wait()

    def finish(self) -> list[Op]:
        """Wait for all pending collectives; return the collectives whose results this rank has failed to use."""
        pending, self._pending = self._pending, {}
        for exchange in pending.values():
            exchange.wait()
        users = {op: Op(COLLECTIVES[op.kind].user, op.microbatch) for op in pending}
        return [op for op, user in users.items() if exchange_before(self._schedule, self._rank, user) == op]

    def forget(self) -> BaseException | None:
        """Drop the pending collectives of a failed step; return the error of the first failed collective, or None."""
        pending, self._pending = self._pending, {}
        return next((failure for exchange in pending.values() if (failure := exchange.failure()) is not None), None)
