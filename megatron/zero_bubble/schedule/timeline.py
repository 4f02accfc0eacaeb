"""The result of a simulation: start and end of every operation, spans, idle time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import Node, nodes_of
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, POST_VALIDATION
from megatron.zero_bubble.schedule.memory import PeakMemory, memory_held, peak_memory, peaks
from megatron.zero_bubble.schedule.pairs import forwards_in_pairs, times_in_pairs


class HardwareQueues(Enum):
    """The number of hardware queues from which a GPU takes its launches."""

    ONE = "1"
    """`CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron-LM demands for tensor parallelism on GPUs before Blackwell."""
    MANY = "many"
    """CUDA's default: launches of one stream do not wait for launches of other streams."""


class TimedOp(NamedTuple):
    """One operation with its start and end, in the unit of the costs."""

    op: Op
    start: float
    end: float


Lanes = tuple[tuple[TimedOp, ...], ...]
"""Rank -> operations of the rank with their times, in execution order."""


def timed_ops(ops: Iterable[Op], starts: Iterable[float], ends: Iterable[float]) -> tuple[TimedOp, ...]:
    """The operations with their start and end times. `timed_ops` uses `map`, which is faster than a loop in Python."""
    return tuple(map(tuple.__new__, repeat(TimedOp), zip(ops, starts, ends, strict=True)))


@dataclass(frozen=True)
class Idle:
    """Idle time of all ranks as a fraction of (number of ranks x longest span): imbalance plus bubble rate."""

    imbalance: float
    """Idle fraction due to the partition: (work of the busiest rank - mean work of a rank) / longest span."""
    bubble: float
    """Bubble rate: the idle fraction due to the schedule, (longest span - work of the busiest rank) / longest span."""

    @classmethod
    def of(cls, spans: Sequence[float], work: Sequence[float]) -> Idle:
        """Compute the imbalance and the bubble rate from the spans and the work of all ranks.

        Negative rounding errors become zero.
        """
        cost, busiest, num_ranks = max(spans), max(work), len(work)
        if not cost:
            return cls(0, 0)
        return cls(max(0, num_ranks * busiest - sum(work)) / (num_ranks * cost), max(0, cost - busiest) / cost)

    @property
    def total(self) -> float:
        """Sum of imbalance and bubble rate: 1 - (work of all ranks) / (number of ranks x longest span)."""
        return self.imbalance + self.bubble

    def __str__(self) -> str:
        parts = f"imbalance {float(self.imbalance):.2%}, bubble rate {float(self.bubble):.2%}"
        return f"idle {float(self.total):.2%} ({parts})"

    def as_json(self) -> dict[str, float]:
        return {
            "idle": float(self.total),
            "imbalance": float(self.imbalance),
            "bubble_rate": float(self.bubble),
        }


def num_ahead(lane: Sequence[TimedOp]) -> int:
    """The number of operations, such as embeddings, that a rank runs before its first forward."""
    return next((k for k, timed in enumerate(lane) if not KINDS[timed.op.kind].runs_ahead), max(0, len(lane) - 1))


@dataclass(frozen=True)
class Timeline:
    """The compute operations of every rank with their times, in the unit of the costs."""

    schedule: Schedule
    """The simulated schedule, without communication."""
    costs: StageCosts
    overlap_communication: bool
    """Whether ranks compute while messages are in flight."""
    lanes: Lanes
    """Rank -> operations of the rank with their times, in execution order. Time starts at 0."""
    hardware_queues: HardwareQueues | None = None
    """Hardware queues of the simulated GPUs; None for a simulation without streams."""
    copies: Lanes = ()
    """Rank -> copies to the host (D) and back (H) on the rank's host link, with their times; empty without offload."""
    lengths: tuple[float, ...] = ()
    """Microbatch -> factor by which the times and the memory of `costs` are multiplied; empty if all factors are 1."""

    @cached_property
    def producers(self) -> dict[Node, tuple[int, int]]:
        """Result -> (rank, position on the rank) of the operation that produces the result.

        The backward of a pair also produces the results of the pair's forward.
        """
        producers: dict[Node, tuple[int, int]] = {}
        for rank, lane in enumerate(self.lanes):
            in_pairs = forwards_in_pairs(self.schedule, rank)
            for position, timed in enumerate(lane):
                producer = rank, position + (timed.op in in_pairs)
                producers.update(dict.fromkeys(nodes_of(self.schedule.placement, rank, timed.op), producer))
        return producers

    @cached_property
    def computations(self) -> tuple[Sequence[TimedOp], ...]:
        """Rank -> operations of the rank with their times, without the forwards of pairs."""
        in_pairs = [forwards_in_pairs(self.schedule, rank) for rank in range(len(self.lanes))]
        return tuple(
            [timed for timed in lane if timed.op not in forwards] if forwards else lane
            for lane, forwards in zip(self.lanes, in_pairs, strict=True)
        )

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Rank -> span of the rank: time from the start of its first operation to the end of its last operation.

        The span of a rank leaves out STEP and VALIDATE, because a rank may validate the optimizer step long before its
        first forward. The span of a rank contains the times of embeddings before the first forward, but not the idle
        time between these embeddings and the first forward.
        """
        spans = []
        for lane in self.lanes:
            computing: Sequence[TimedOp] = lane
            if self.schedule.has_post_validation:
                computing = [timed for timed in lane if timed.op.kind not in POST_VALIDATION]
            ahead = num_ahead(computing)
            embeddings = sum(timed.end - timed.start for timed in computing[:ahead])
            spans.append(computing[-1].end - computing[ahead].start + embeddings if computing else 0)
        return tuple(spans)

    @property
    def cost(self) -> float:
        """The longest of all ranks' spans: the time of an iteration if no rank waits for another between iterations."""
        return max(self.spans)

    @property
    def makespan(self) -> float:
        """The time from the earliest start to the latest end of the operations on all ranks."""
        lanes = [lane for lane in self.lanes if lane]
        return max(lane[-1].end for lane in lanes) - min(lane[0].start for lane in lanes) if lanes else 0

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Rank -> sum of the times of the rank's operations."""
        if self.lengths:
            in_step = ([timed for timed in lane if timed.op.kind not in POST_VALIDATION] for lane in self.lanes)
            return tuple(sum(timed.end - timed.start for timed in lane) for lane in in_step)
        by_kind, work = in_groups(self.costs, self.schedule.groups).times, []
        for rank, lane in enumerate(self.lanes):
            in_pairs = times_in_pairs(self.schedule, self.costs, rank)
            stages = self.schedule.placement.stages_of(rank)
            times = {(kind, chunk): by_kind[kind][stage] for kind in by_kind for chunk, stage in enumerate(stages)}
            ops = (timed.op for timed in lane if timed.op not in in_pairs) if in_pairs else map(itemgetter(0), lane)
            work.append(sum(times[kind, chunk] for kind, _, chunk in ops) + sum(in_pairs.values()))
        return tuple(work)

    @cached_property
    def idle(self) -> Idle:
        """Idle time of all ranks, divided by (number of ranks x longest span): the sum of imbalance and bubble rate."""
        return Idle.of(self.spans, self.work)

    @property
    def bubble_rate(self) -> float:
        """The bubble rate: (longest span - work of the busiest rank) / longest span.

        With equal stages and m microbatches, the bubble rate is (cost - m (T_F + T_B + T_W)) / cost, where cost is the
        longest span of a rank (Qi et al. 2024). With unequal stages, the bubble rate measures the schedule and not the
        partition, because in every schedule the longest span is at least the work of the busiest rank. `Timeline.idle`
        contains the bubble rate and the imbalance of the partition.
        """
        return self.idle.bubble

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Rank -> peak memory of the rank's activations, in the unit of the costs."""
        return peak_memory(self.schedule, self.costs, self.lengths)

    def memory_held(self, rank: int) -> Iterator[tuple[Op, float, float]]:
        """Yield every operation of `rank`, the memory during the operation, and the memory after the operation."""
        return memory_held(self.schedule, self.costs, rank, self.lengths)

    @cached_property
    def peaks(self) -> tuple[PeakMemory, ...]:
        """Rank -> (peak memory of the rank's activations, first operation that reaches the peak memory)."""
        return peaks(self.schedule, self.costs, self.lengths)
