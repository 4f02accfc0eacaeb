"""The pass that spreads embedding and output layer over all ranks, and adds the operations on vocabulary shards.

Every rank holds the same number of rows of both weights ("Balancing Pipeline Parallelism with Vocabulary
Parallelism", arXiv 2411.05288, algorithm 2). The last stage's backward then waits until all ranks have run S, so that
all backwards come later: a delay of the time that one microbatch takes of a rank holds one microbatch more in flight,
and leaves the rhythm of the schedule as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import collective_time
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import BACKWARDS, KINDS, VOCABULARY, OpKind
from megatron.zero_bubble.schedule.pairs import apart
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Timeline

LEAD = 2
"""How many microbatches before its use an embedding is looked up, so that no rank waits for it."""


def interval(schedule: Schedule, costs: StageCosts) -> float:
    """The work of one microbatch on the busiest rank."""
    return max(schedule.placement.sums([costs.work(stage) for stage in range(schedule.num_stages)]))


def shortest_delay(costs: StageCosts) -> float:
    """The time between the last stage's F and its B that no order avoids: two collectives, and S between them."""
    return 2 * collective_time(costs) + max(costs.time_s)


def with_vocabulary(schedule: Schedule, costs: StageCosts, given_delays: Sequence[float]) -> list[Schedule]:
    """The same schedule, without communication, with E, S, L, T and EW, once for each delay of all backwards and W's.

    Forwards keep their times, of a simulation in which W takes the time of the shards' operations as well. S runs as
    soon as the output of the last stage is there, E some microbatches before F needs it, and T and EW with the W of
    their microbatch. Operations are put in the order of those times.

    Pairs become two operations each: between them stand operations on shards.

    Args:
        given_delays: delays of at least `shortest_delay(costs)`; with a shorter one the ranks may wait for each other
            for ever.
    """
    schedule = apart(without_vocabulary(schedule))
    timeline = simulate(schedule, costs.with_vocabulary_in_weight_gradients())
    return [_in_order(_Times(timeline, costs, delay)) for delay in given_delays]


def delays(schedule: Schedule, costs: StageCosts) -> list[float]:
    """The delays of all backwards that are worth trying, from the shortest to the longest."""
    step, shortest = interval(schedule, costs), shortest_delay(costs)
    return sorted({max(shortest, delay) for delay in (shortest, step / 2, step, step + shortest, 1.5 * step)})


def with_best_delay(schedule: Schedule, costs: StageCosts, limits: Sequence[float] | None) -> Schedule:
    """The same schedule with operations on vocabulary shards, and the delay with which it is shortest.

    Args:
        limits: memory limit of every rank; of the delays only those count that keep within it, if any does.
    """
    timelines = [simulate(each, costs) for each in with_vocabulary(schedule, costs, delays(schedule, costs))]

    def order(timeline: Timeline) -> tuple[bool, float, float]:
        exceeds = limits is not None and any(
            peak > limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True)
        )
        return exceeds, timeline.cost, timeline.makespan

    return min(timelines, key=order).schedule


def _in_order(times: _Times) -> Schedule:
    ranks = (tuple(op for *_, op in sorted(times.of_rank(rank))) for rank in range(times.schedule.num_ranks))
    return replace(times.schedule, ops=tuple(ranks))


def without_vocabulary(schedule: Schedule) -> Schedule:
    """The same schedule, without communication and without operations on vocabulary shards."""
    ranks = (schedule.compute_ops(rank) for rank in range(schedule.num_ranks))
    return replace(schedule, ops=tuple(tuple(op for op in ops if op.kind not in VOCABULARY) for ops in ranks))


_Timed = tuple[float, int, int, Op]
"""Sort key of operations: the planned start, then an order for operations that start at the same time."""


class _Times:
    """When every operation is to start."""

    def __init__(self, timeline: Timeline, costs: StageCosts, delay: float) -> None:
        self.schedule, self.costs = timeline.schedule, costs
        self._starts = [
            {timed.op: timed.start + delay * (timed.op.kind is not OpKind.F) for timed in lane}
            for lane in timeline.lanes
        ]
        """Rank -> when each of its operations in its stages starts."""
        placement, microbatches = self.schedule.placement, range(self.schedule.num_microbatches)
        last_stage, first_rank = placement.num_stages - 1, placement.rank_of(0)
        self._last_rank, last_chunk = placement.rank_of(last_stage), placement.chunk_of(last_stage)
        forwards, last_forwards = self._starts[first_rank], self._starts[self._last_rank]
        self._embedded = [forwards[Op(OpKind.F, microbatch)] for microbatch in microbatches]
        """Microbatch -> when the first stage uses its embedding."""
        self._output = [
            last_forwards[Op(OpKind.F, microbatch, last_chunk)] + costs.time_f[last_stage]
            for microbatch in microbatches
        ]
        """Microbatch -> when the output of the last stage is there."""
        self._gradient = [start + costs.time_b[0] + costs.time_w[0] for start in self._starts_of(first_rank, OpKind.B)]
        """Microbatch -> when the gradient of its embedding is there."""

    def of_rank(self, rank: int) -> Iterator[_Timed]:
        """All operations of `rank`; of those with equal times the one comes first that another rank waits for."""
        order = [OpKind.E, OpKind.S, OpKind.L, *(kind for kind in KINDS if kind not in VOCABULARY), OpKind.T, OpKind.EW]
        starts = {**self._starts[rank], **self._of_shard(rank)}
        return ((start, order.index(op.kind), op.microbatch, op) for op, start in starts.items())

    def _of_shard(self, rank: int) -> dict[Op, float]:
        """When each operation on the shard of `rank` is to start."""
        message, until_loss = collective_time(self.costs), shortest_delay(self.costs)
        lead = LEAD * interval(self.schedule, self.costs)
        starts: dict[Op, float] = {}
        shared = zip(self._embedded, self._output, self._gradient, self._starts_of(rank, OpKind.W), strict=True)
        for microbatch, (embedded, output, gradient, weights) in enumerate(shared):
            loss = output + until_loss
            starts[Op(OpKind.E, microbatch)] = embedded - lead
            starts[Op(OpKind.S, microbatch)] = output + message
            if rank == self._last_rank:
                starts[Op(OpKind.L, microbatch)] = loss
            starts[Op(OpKind.T, microbatch)] = max(weights, loss + message)
            starts[Op(OpKind.EW, microbatch)] = max(weights, gradient + message)
        return starts

    def _starts_of(self, rank: int, result: OpKind) -> list[float]:
        """Microbatch -> when chunk 0 of `rank` makes `result`, B or W."""
        starts = self._starts[rank]
        kinds = (result, *(kind for kind in BACKWARDS if result in KINDS[kind].makes))
        return [
            next(starts[op] for kind in kinds if (op := Op(kind, microbatch)) in starts)
            for microbatch in range(self.schedule.num_microbatches)
        ]
