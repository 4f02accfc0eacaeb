"""The result of a simulation: when every operation runs, and the figures that follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, POST_VALIDATION
from megatron.zero_bubble.schedule.memory import PeakMemory, memory_held, peak_memory, peaks
from megatron.zero_bubble.schedule.pairs import forwards_in_pairs, times_in_pairs


class HardwareQueues(Enum):
    """The number of hardware queues from which a GPU takes its launches."""

    ONE = "1"
    """`CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron-LM demands for tensor parallelism on GPUs before Blackwell."""
    MANY = "many"
    """CUDA's default: launches of one stream do not wait for those of another."""


class TimedOp(NamedTuple):
    """One operation and when it ran."""

    op: Op
    start: float
    end: float


def timed_ops(ops: Iterable[Op], starts: Iterable[float], ends: Iterable[float]) -> tuple[TimedOp, ...]:
    """The operations with these times, made without a step of the interpreter for each."""
    return tuple(map(tuple.__new__, repeat(TimedOp), zip(ops, starts, ends, strict=True)))


@dataclass(frozen=True)
class Idle:
    """Share of the ranks' time without work, in two parts. The time of each rank is the longest span of all ranks."""

    imbalance: float
    """The imbalance: the idle share that follows from the partition, because ranks have less work than the busiest
    rank."""
    bubble: float
    """The bubble rate: the idle share that follows from the order, as the part of the longest span without work of the
    busiest rank."""

    @classmethod
    def of(cls, spans: Sequence[float], work: Sequence[float]) -> Idle:
        """Compute the share from the span and the work of every rank; rounding errors below zero become zero."""
        cost, busiest, num_ranks = max(spans), max(work), len(work)
        if not cost:
            return cls(0, 0)
        return cls(max(0, num_ranks * busiest - sum(work)) / (num_ranks * cost), max(0, cost - busiest) / cost)

    @property
    def total(self) -> float:
        """Imbalance and bubble rate together: 1 - sum of the work / (number of ranks x longest span)."""
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
    """How many operations of a rank run while its pipeline still fills."""
    return next((k for k, timed in enumerate(lane) if not KINDS[timed.op.kind].runs_ahead), max(0, len(lane) - 1))


@dataclass(frozen=True)
class Timeline:
    """The compute operations of every rank with their times, in the unit of the costs.

    `lanes[rank]` holds the operations of `rank` in the order in which it ran them; time 0 is when the
    first rank may start.
    """

    schedule: Schedule
    costs: StageCosts
    overlap_communication: bool
    lanes: tuple[tuple[TimedOp, ...], ...]
    hardware_queues: HardwareQueues | None = None
    """The hardware queues of the simulated GPUs; None where messages do not wait for launches."""
    copies: tuple[tuple[TimedOp, ...], ...] = ()
    """For every rank, D and H with the times of their copies on its host link; empty if nothing is offloaded."""
    lengths: tuple[float, ...] = ()
    """For every microbatch, the factor of the costs' times and memory; empty if all are alike."""

    @cached_property
    def computations(self) -> tuple[Sequence[TimedOp], ...]:
        """The lanes, in which a pair of operations is one entry, in the place of its backward."""
        in_pairs = [forwards_in_pairs(self.schedule, rank) for rank in range(len(self.lanes))]
        return tuple(
            [timed for timed in lane if timed.op not in forwards] if forwards else lane
            for lane, forwards in zip(self.lanes, in_pairs, strict=True)
        )

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """For every rank, the time from the start of its first operation to the end of its last.

        STEP and VALIDATE do not count: a rank validates long before its first forward arrives, if there is time.
        Embeddings that it looks up before then count with their own time alone.
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
        """The longest span of a rank: the time of a training step when steps interlock."""
        return max(self.spans)

    @property
    def makespan(self) -> float:
        """The time from the first operation anywhere to the last operation anywhere."""
        lanes = [lane for lane in self.lanes if lane]
        return max(lane[-1].end for lane in lanes) - min(lane[0].start for lane in lanes) if lanes else 0

    @cached_property
    def work(self) -> tuple[float, ...]:
        """For every rank, the sum of the times of its operations."""
        if self.lengths:
            return tuple(sum(timed.end - timed.start for timed in lane) for lane in self.lanes)
        by_kind, work = self.costs.in_groups(self.schedule.groups).times(), []
        for rank, lane in enumerate(self.lanes):
            in_pairs = times_in_pairs(self.schedule, self.costs, rank)
            stages = self.schedule.placement.stages_of(rank)
            times = {(kind, chunk): by_kind[kind][stage] for kind in by_kind for chunk, stage in enumerate(stages)}
            alone = (timed.op for timed in lane if timed.op not in in_pairs) if in_pairs else map(itemgetter(0), lane)
            work.append(sum(times[kind, chunk] for kind, _, chunk in alone) + sum(in_pairs.values()))
        return tuple(work)

    @cached_property
    def idle(self) -> Idle:
        """The idle share of all ranks' time, divided into imbalance and bubble."""
        return Idle.of(self.spans, self.work)

    @property
    def bubble_rate(self) -> float:
        """(cost - work) / cost, with the work of the busiest rank.

        For equal stages it is the published (cost - m (T_F + T_B + T_W)) / cost. For unequal stages no schedule for
        this placement can cost less than the busiest rank's work, so that the rate is the waste of the schedule alone.
        `idle` also has the waste of the uneven partition.
        """
        return self.idle.bubble

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """For every rank, the most memory that its operations hold at once, in the unit of the costs."""
        return peak_memory(self.schedule, self.costs, self.lengths)

    def memory_held(self, rank: int) -> Iterator[tuple[Op, float, float]]:
        """For every operation of `rank`: the operation, and the memory of the rank while it runs, and after it."""
        return memory_held(self.schedule, self.costs, rank, self.lengths)

    @cached_property
    def peaks(self) -> tuple[PeakMemory, ...]:
        """For every rank, the most that its operations hold at once, and the first operation that reaches it."""
        return peaks(self.schedule, self.costs, self.lengths)
