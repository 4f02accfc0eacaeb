"""Emulates a rank's vocabulary shard: operations are sleeps, and collectives are real, with the sizes in a training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.emulation.counted_memory import Held
from benchmarks.emulation.sleeping import Emulation, sleep_until
from megatron.zero_bubble.runtime.collectives import Collectives
from megatron.zero_bubble.runtime.exchange_lane import ExchangeLane, PendingExchange, ThreadLane
from megatron.zero_bubble.schedule import Op, OpKind, Schedule, StageCosts
from megatron.zero_bubble.schedule.graph import collective_time

_BYTES_A_TOKEN = 2 * 4096
"""Bytes of one token in a message between stages: 4096 values of 16 bits."""


class EmulatedShard:
    """The vocabulary shard of one rank, for `EmulatedStage`.

    An emulated collective is complete when two conditions hold: the real collective is complete, and the time in the
    costs has passed since the last of the needed ranks began. The first elements of a collective's tensors contain the
    times at which ranks began the collective.

    Attributes:
        begun: time at which the last needed rank began the latest collective of this rank.
    """

    def __init__(
        self, emulation: Emulation, costs: StageCosts, schedule: Schedule, rank: int, group: Collectives
    ) -> None:
        placement = schedule.placement
        stage = placement.stage_of(rank)
        self._emulation, self._group = emulation, group
        self._times = {kind: times[stage] for kind, times in costs.times.items()}
        self._memory_s = costs.memory_s[stage]
        self._seconds = collective_time(costs) / 1e3
        self._first, self._last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
        self._held: dict[int, Held] = {}
        self.begun = 0.0
        num_bytes = emulation.spec.empty().nbytes
        num_tokens = max(1, num_bytes // _BYTES_A_TOKEN)
        self._values = self._tensor(num_bytes)
        self._wide_values = self._tensor(2 * num_bytes)
        """A tensor with as many values as `_values`, but in 32 bits, for the sum of the input gradients."""
        self._tokens = self._tensor(8 * num_tokens)
        self._numbers = self._tensor(4 * num_tokens)
        self._statistics = self._tensor(3 * 4 * num_tokens)
        self._everyones = torch.zeros(group.size, *self._statistics.shape, dtype=torch.float64)
        self._exchanges: dict[OpKind, Callable[[], None]] = {
            OpKind.TOKENS: lambda: self._broadcast(self._tokens, self._first),
            OpKind.EMBEDDED: lambda: self._sum_to(self._values, self._first),
            OpKind.HIDDEN: self._give_hidden,
            OpKind.SOFTMAX: self._combine,
            OpKind.LOSS_GRAD: lambda: self._broadcast(self._numbers, self._last),
            OpKind.EMBEDDED_GRAD: lambda: self._broadcast(self._values, self._first),
        }

    def _tensor(self, num_bytes: int) -> torch.Tensor:
        """Return a tensor of at least this size, with room for one time for each rank."""
        return torch.zeros(max(self._group.size, -(-num_bytes // 8)), dtype=torch.float64)

    def run(self, op: Op) -> None:
        """Emulate an operation on the shard; S allocates memory, which T of the same microbatch releases."""
        if op.kind is OpKind.S:
            self._held[op.microbatch] = self._emulation.memory.hold(self._memory_s)
        self._emulation.compute(self._times[op.kind])
        if op.kind is OpKind.T:
            del self._held[op.microbatch]

    def exchange(self, op: Op) -> None:
        """Take part in a collective; this method runs in the thread for collectives."""
        self.begun = time.perf_counter()
        self._exchanges[op.kind]()
        sleep_until(self.begun + self._seconds)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tensor[0] = self.begun
        self._group.broadcast(tensor, root)
        self.begun = max(self.begun, tensor[0].item())

    def _sum_to(self, tensor: torch.Tensor, root: int) -> None:
        """Sum a tensor over ranks; each rank contributes its start time in an element that is zero on other ranks."""
        times = tensor[: self._group.size].zero_()
        times[self._group.rank] = self.begun
        self._group.sum_to(tensor, root)
        self.begun = times.max().item()

    def _give_hidden(self) -> None:
        self._broadcast(self._values, self._last)
        self._group.broadcast(self._tokens, self._last)

    def _combine(self) -> None:
        self._statistics[0] = self.begun
        self._group.gather_all(self._statistics, self._everyones)
        begun = self._everyones[:, 0].max().item()
        self._sum_to(self._wide_values, self._last)
        self.begun = begun


class EmulatedLane:
    """Runs collectives in a thread, and measures exposed communication, as `EmulatedLink` does for messages.

    Attributes:
        exposed: total seconds of waiting for collectives that all ranks had begun, since `exposed` was last set to 0.
    """

    waits_in_thread = False  # as on a GPU, where a stream runs the collectives

    def __init__(self, shard: EmulatedShard, leave: Callable[[], None]) -> None:
        self._shard, self._inner = shard, ThreadLane(leave)
        self.exposed = 0.0

    def submit(self, exchange: Callable[[], None]) -> PendingExchange:
        return _MeasuredExchange(self, self._shard, self._inner, exchange)

    def close(self) -> None:
        self._inner.close()


class _MeasuredExchange:
    def __init__(
        self, lane: EmulatedLane, shard: EmulatedShard, inner: ExchangeLane, exchange: Callable[[], None]
    ) -> None:
        self._lane, self._shard = lane, shard
        self._exchange = exchange
        self._begun = 0.0
        self._pending = inner.submit(self._run)

    def _run(self) -> None:
        self._exchange()
        self._begun = self._shard.begun

    def failure(self) -> BaseException | None:
        return self._pending.failure()

    def wait(self) -> None:
        start = time.perf_counter()
        self._pending.wait()
        self._lane.exposed += max(0.0, time.perf_counter() - max(start, self._begun))
