"""Simulated times of activation copies between device and host, and passes that insert or remove these copies."""

from __future__ import annotations

from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import BACKWARDS, COPIES, KINDS, PAIRED, OpKind
from megatron.zero_bubble.schedule.pairs import forwards_in_pairs
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline

_Key = tuple[int, int]
"""Identifies copied activations: (microbatch, chunk)."""


class LinkTimes:
    """The host link of one rank: the link between its device and its host. The link runs one copy at a time, in the
    order in which the copies are queued.

    A copy to the host is queued when F ends, and D (offload) waits for the end of this copy. A copy to the device is
    queued when the rank reaches H (reload), and the backward waits for the end of this copy.
    """

    def __init__(self, schedule: Schedule, costs: StageCosts, rank: int) -> None:
        self.copies: list[TimedOp] = []
        """Copies to the host (D) and back (H) with their times, in the order in which the link runs the copies."""
        self._times = {
            (kind, chunk): getattr(costs, KINDS[kind].link)[stage]
            for chunk, stage in enumerate(schedule.placement.stages_of(rank))
            for kind in COPIES
        }
        self._free: float = 0
        self._offloaded = frozenset((op.microbatch, op.chunk) for op in schedule.ops[rank] if op.kind is OpKind.D)
        self._out: dict[_Key, float] = {}
        """(microbatch, chunk) -> end time of the copy of activations to the host."""
        self._back: dict[_Key, float] = {}
        """(microbatch, chunk) -> end time of the copy of activations back to the device."""

    @classmethod
    def of_ranks(cls, schedule: Schedule, costs: StageCosts) -> list[LinkTimes]:
        """The host links of all ranks, with no copy queued; an empty list if the schedule has no copies."""
        return [cls(schedule, costs, rank) for rank in range(schedule.num_ranks)] if schedule.offloads else []

    def start_of(self, op: Op, start: float) -> float:
        """The start time of an operation: `start`, or later if the operation has to wait for a copy."""
        key = op.microbatch, op.chunk
        if op.kind is OpKind.D:
            return max(start, self._out[key])
        if op.kind in BACKWARDS:
            return max(start, self._back.get(key, start))
        return start

    def copy_after(self, op: Op, end: float) -> None:
        """If the operation `op` starts a copy, queue the copy at `end`, the end time of `op`."""
        key = op.microbatch, op.chunk
        if op.kind is OpKind.F and key in self._offloaded:
            self._out[key] = self._copy(op._replace(kind=OpKind.D), end)
        elif op.kind is OpKind.H:
            self._back[key] = self._copy(op, end)

    def _copy(self, op: Op, at: float) -> float:
        start = max(self._free, at)
        self._free = start + self._times[op.kind, op.chunk]
        self.copies.append(TimedOp(op, start, self._free))
        return self._free


def times_of_return(timeline: Timeline, rank: int) -> dict[Op, float]:
    """Backward of `rank` -> time at which the activations for the backward are back on the device."""
    if not timeline.copies:
        return {}
    back = {timed.op[1:]: timed.end for timed in timeline.copies[rank] if timed.op.kind is OpKind.H}
    return {op: back[op[1:]] for op, *_ in timeline.lanes[rank] if op.kind in BACKWARDS and op[1:] in back}


def check_copies(schedule: Schedule, rank: int) -> None:
    """Check the offloads (D) of a rank.

    Every offload (D) needs a reload (H). Offloaded activations must not be recomputed. Neither the forward that makes
    offloaded activations nor the backward that uses them may belong to a pair (see `pairs`).

    Raises:
        InvalidSchedule: an offload (D) has no reload (H), or offloaded activations are recomputed or belong to a pair.
    """
    if not schedule.offloads:
        return
    ops, in_pairs = schedule.op_sets[rank], forwards_in_pairs(schedule, rank)
    for op in schedule.ops[rank]:
        if op.kind is not OpKind.D:
            continue
        if op._replace(kind=OpKind.H) not in ops:
            raise schedule.invalid(f"rank {rank} lacks {op._replace(kind=OpKind.H)} for {op}")
        others = (op._replace(kind=kind) for kind in (OpKind.R, *sorted(PAIRED)))
        other = next((candidate for candidate in others if candidate in ops), None)
        if op._replace(kind=OpKind.F) in in_pairs:
            other = op._replace(kind=OpKind.F)
        if other is not None:
            activations = "recomputed activations" if other.kind is OpKind.R else "activations of a pair"
            raise schedule.invalid(f"rank {rank} runs {op} and also {other}: {activations} cannot be offloaded")


def without_copies(schedule: Schedule) -> Schedule:
    """The given schedule without offload: every F keeps its activations on the device.

    If the given schedule has offload, the returned schedule has no communication.
    """
    return schedule.without(COPIES) if schedule.offloads else schedule


def with_copies_everywhere(schedule: Schedule) -> Schedule:
    """Remove communication, and insert one offload (D) and one reload (H) in every stage, to measure the copies.

    The activations of the first microbatch of a stage are copied to the host right after F, and are copied back to the
    device right before the backward. The recomputation (R) of the first microbatch is removed.
    """
    schedule = without_copies(schedule.without_communication())
    if not BACKWARDS & schedule.kinds:
        return schedule
    copied = {OpKind.R: (), OpKind.F: (OpKind.F, OpKind.D), **{kind: (OpKind.H, kind) for kind in BACKWARDS}}
    return schedule.with_kinds(lambda _, op: copied.get(op.kind, (op.kind,)) if op.microbatch == 0 else (op.kind,))


def host_memory(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Rank -> peak host memory of the rank's offloaded activations, in the unit of the costs.

    Activations take memory on the host from the end of F until their copy back to the device is queued.
    """
    copied, peaks = in_groups(costs, schedule.groups).memory_d, []
    for rank, ops in enumerate(schedule.ops):
        sizes = [copied[stage] for stage in schedule.placement.stages_of(rank)]
        memory: float = 0
        peak: float = 0
        for op in ops:
            if op.kind is OpKind.F and op._replace(kind=OpKind.D) in schedule.op_sets[rank]:
                memory += sizes[op.chunk]
                peak = max(peak, memory)
            elif op.kind is OpKind.H:
                memory -= sizes[op.chunk]
        peaks.append(peak)
    return tuple(peaks)


def num_offloaded(schedule: Schedule) -> int:
    """The number of offloads (D) on all ranks of a schedule."""
    return sum(op.kind is OpKind.D for ops in schedule.ops for op in ops)


def offloaded_share(schedule: Schedule) -> float:
    """Fraction of all forwards whose activations are copied to the host."""
    return num_offloaded(schedule) / (schedule.num_stages * schedule.num_microbatches)
