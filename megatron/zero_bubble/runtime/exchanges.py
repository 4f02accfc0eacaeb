"""Keeps track of one rank's collectives between vocabulary shards during a step."""

from __future__ import annotations

from collections.abc import Callable

from megatron.zero_bubble.runtime.exchange_lane import ExchangeLane, PendingExchange
from megatron.zero_bubble.schedule import Op, Schedule
from megatron.zero_bubble.schedule.graph import exchange_before
from megatron.zero_bubble.schedule.kinds import COLLECTIVES


class Exchanges:
    """The collectives that one rank has started and no operation has waited for yet.

    Args:
        schedule: says which operation of the rank waits for which collective.
        rank: this process's pipeline rank.
        lane: where collectives run; None if the schedule has none.
    """

    def __init__(self, schedule: Schedule, rank: int, lane: ExchangeLane | None) -> None:
        self._schedule, self._rank, self._lane = schedule, rank, lane
        self._pending: dict[Op, PendingExchange] = {}

    def start(self, op: Op, exchange: Callable[[], None]) -> None:
        """Let the lane run the collective `op`, by calling `exchange`; return at once."""
        assert self._lane is not None, f"{op} needs a lane for exchanges"
        self._pending[op] = self._lane.submit(exchange)

    def wait_before(self, op: Op) -> None:
        """Wait for the collective that brings the computation `op` its input, if one does."""
        exchange = exchange_before(self._schedule, self._rank, op)
        if exchange is not None:
            self._pending.pop(exchange).wait()

    def finish(self) -> list[Op]:
        """Wait for and forget all collectives; return those whose result an operation here should have used."""
        pending, self._pending = self._pending, {}
        for exchange in pending.values():
            exchange.wait()
        return [op for op in pending if self._is_used_here(op)]

    def forget(self) -> BaseException | None:
        """Forget all collectives of a failed step without waiting; return the error of a failed collective, if any."""
        pending, self._pending = self._pending, {}
        return next((failure for exchange in pending.values() if (failure := exchange.failure()) is not None), None)

    def _is_used_here(self, op: Op) -> bool:
        user = Op(COLLECTIVES[op.kind].user, op.microbatch)
        return exchange_before(self._schedule, self._rank, user) == op
