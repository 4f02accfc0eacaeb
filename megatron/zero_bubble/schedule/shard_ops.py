"""The pass that inserts the operations on vocabulary shards into a schedule.

The embedding and the output layer are spread over all ranks, and every rank has the same number of rows of each weight
("Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv 2411.05288, algorithm 2). The backward of the last
stage waits for the output layer (S) of all ranks, so that the backwards of all stages start later. A delay of the
backwards by the time of one microbatch keeps one more microbatch in flight, and does not change the steady state of the
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import collective_time
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import BACKWARDS, KINDS, VOCABULARY, OpKind
from megatron.zero_bubble.schedule.pairs import apart
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Timeline

LEAD = 2
"""Number of microbatches by which an embedding (E) precedes its F, so that no rank waits for embeddings."""


def interval(schedule: Schedule, costs: StageCosts) -> float:
    """The time of F, B, W and the operations on the vocabulary shard for one microbatch on the busiest rank."""
    return max(schedule.placement.sums([costs.work(stage) for stage in range(schedule.num_stages)]))


def shortest_delay(costs: StageCosts) -> float:
    """The least time between F and B of the last stage: two collectives and the slowest S (output layer)."""
    return 2 * collective_time(costs) + max(costs.time_s)


def with_vocabulary(
    schedule: Schedule, costs: StageCosts, given_delays: Sequence[float], *, overlap_communication: bool = True
) -> list[Schedule]:
    """Insert operations on vocabulary shards; return a schedule without communication for each of `given_delays`.

    The operations of a rank are sorted by planned start times. The planned start of F comes from a simulation in which
    the time of W includes the operations on vocabulary shards. The planned starts of backwards and W are their
    simulated starts plus the given delay. E (embedding) starts earlier than the F of the first stage for the same
    microbatch, by the time of `LEAD` microbatches. S (output layer) starts when the output of the last stage arrives.
    The weight gradients T and EW start with the W of their microbatch, or later if their inputs arrive later. Pairs are
    split, because operations on vocabulary shards may come between the forward and the backward of a pair.

    Args:
        given_delays: delays of backwards and W, one delay for each returned schedule. With a delay below
            `shortest_delay(costs)` the ranks may deadlock.
    """
    schedule, in_w = apart(schedule.without(VOCABULARY)), costs.with_vocabulary_in_weight_gradients()
    timeline = simulate(schedule, in_w, overlap_communication=overlap_communication)
    return [_Times(timeline, costs, delay).in_order() for delay in given_delays]


def delays(schedule: Schedule, costs: StageCosts) -> list[float]:
    """The delays of the backwards that `with_best_delay` tries, from the shortest to the longest."""
    step, shortest = interval(schedule, costs), shortest_delay(costs)
    return sorted({max(shortest, delay) for delay in (shortest, step / 2, step, step + shortest, 1.5 * step)})


def with_best_delay(
    schedule: Schedule,
    costs: StageCosts,
    limits: Sequence[float] | None,
    *,
    overlap_communication: bool = True,
    takes_makespan: bool = False,
) -> Schedule:
    """Insert operations on vocabulary shards into a schedule, with the best of several delays of the backwards.

    Args:
        limits: memory limit of every rank; None without limits. A schedule that exceeds a memory limit is chosen only
            if all tried schedules exceed a memory limit.
        takes_makespan: whether schedules are compared by their makespan, and not by the longest span of a rank.
    """
    tried = with_vocabulary(schedule, costs, delays(schedule, costs), overlap_communication=overlap_communication)
    timelines = [simulate(each, costs, overlap_communication=overlap_communication) for each in tried]

    def order(timeline: Timeline) -> tuple[bool, float, float]:
        exceeds = limits is not None and any(
            peak > limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True)
        )
        times = timeline.cost, timeline.makespan
        return exceeds, *(times[::-1] if takes_makespan else times)

    return min(timelines, key=order).schedule


class _Times:
    """The planned start times of all operations."""

    def __init__(self, timeline: Timeline, costs: StageCosts, delay: float) -> None:
        self.schedule, self.costs = timeline.schedule, costs
        self._starts = [
            {timed.op: timed.start + delay * (timed.op.kind is not OpKind.F) for timed in lane}
            for lane in timeline.lanes
        ]
        """Rank -> {operation: planned start}, without operations on shards."""
        placement = self.schedule.placement
        last_stage, first_rank = placement.num_stages - 1, placement.rank_of(0)
        self._last_rank, last_chunk = placement.rank_of(last_stage), placement.chunk_of(last_stage)
        self._embedded = self._starts_of(first_rank, OpKind.F)
        """Microbatch -> planned start of the F of the first stage, which needs the embedding."""
        last_forwards = self._starts_of(self._last_rank, OpKind.F, last_chunk)
        self._output = [start + costs.time_f[last_stage] for start in last_forwards]
        """Microbatch -> planned end of the F of the last stage."""
        self._gradient = [start + costs.time_b[0] + costs.time_w[0] for start in self._starts_of(first_rank, OpKind.B)]
        """Microbatch -> planned time at which the gradient of the embedding is ready."""

    def in_order(self) -> Schedule:
        """Sort the operations of every rank by planned start.

        At equal planned starts, operations for which other ranks wait come first.
        """
        # An R that takes no time starts at the same time as its B.
        first, last = (OpKind.E, OpKind.S, OpKind.L, OpKind.R), (OpKind.T, OpKind.EW)
        order = [*first, *(kind for kind in KINDS if kind not in first + last), *last]
        ranks = []
        for rank, own in enumerate(self._starts):
            starts = {**own, **self._of_shard(rank)}
            timed = sorted((start, order.index(op.kind), op.microbatch, op) for op, start in starts.items())
            ranks.append(tuple(op for *_, op in timed))
        return replace(self.schedule, ops=tuple(ranks))

    def _of_shard(self, rank: int) -> dict[Op, float]:
        """Operation on the vocabulary shard of `rank` -> planned start of the operation."""
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

    def _starts_of(self, rank: int, result: OpKind, chunk: int = 0) -> list[float]:
        """Microbatch -> planned start of the operation in `chunk` of `rank` that makes `result` (F, B or W)."""
        starts = self._starts[rank]
        kinds = (result, *(kind for kind in BACKWARDS if result in KINDS[kind].makes))
        return [
            next(starts[op] for kind in kinds if (op := Op(kind, microbatch, chunk)) in starts)
            for microbatch in range(self.schedule.num_microbatches)
        ]
