"""Simulation of schedules: (Schedule, StageCosts) -> Timeline with the start and end of every operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.collector import paused_collector
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Deadlock, ScheduleError
from megatron.zero_bubble.schedule.graph import circle, message_time, send_after, sources
from megatron.zero_bubble.schedule.host_link import LinkTimes
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, PAIRED, OpKind
from megatron.zero_bubble.schedule.pairs import times_in_pairs
from megatron.zero_bubble.schedule.streams import HardwareQueues, run_on_streams
from megatron.zero_bubble.schedule.timeline import Lanes, Timeline, timed_ops


@paused_collector()
def simulate(
    schedule: Schedule,
    costs: StageCosts,
    *,
    overlap_communication: bool = True,
    hardware_queues: HardwareQueues | None = None,
    lengths: Sequence[float] = (),
) -> Timeline:
    """Simulate the compute operations of a schedule with given costs.

    Every rank runs its operations in order. An operation starts as soon as its rank is free and the inputs of the
    operation have arrived. A message between ranks takes `costs.time_comm`. VALIDATE waits for the reduction of the
    norm of all gradients. The reduction of the norm takes the time of a collective (`collective_time`) and occupies no
    rank. Copies to and from the host occupy only the host link of their rank (see `LinkTimes`). The simulation computes
    only sums, maxima and products with `lengths`, so that integers and fractions give exact results.

    Args:
        schedule: schedule with or without communication.
        costs: costs of the stages.
        overlap_communication: whether ranks compute while messages are in flight. Without overlap, a message occupies
            the sender right after the operation that makes the tensor, and the receiver right before the operation that
            uses the tensor.
        hardware_queues: number of hardware queues of a GPU. If `hardware_queues` is given, a lowered schedule is
            simulated on NCCL's streams. On NCCL's streams, a message also waits until its receive is posted and the
            previous message of its channel is complete. With one hardware queue a computation also waits for all
            earlier launches of its rank. By default NCCL's streams are not simulated.
        lengths: microbatch -> factor by which the times and the memory of `costs` are multiplied; by default 1.

    Returns:
        The timeline, in the units of the costs.

    Raises:
        ScheduleError: schedule and costs have different numbers of stages, or `lengths` does not fit the schedule.
        InvalidSchedule: a schedule that is simulated on NCCL's streams lacks a message.
        Deadlock: some ranks wait for each other forever.
    """
    schedule.require_stages(costs.num_stages)
    if hardware_queues is not None:
        assert overlap_communication, "on streams messages overlap with computations"
        assert not lengths, "on streams all microbatches have the same length"
        on_streams, copies = run_on_streams(schedule, in_groups(costs, schedule.groups), hardware_queues)
        return Timeline(schedule.without_communication(), costs, True, on_streams, hardware_queues, copies)
    schedule = schedule.without_communication()
    if lengths:
        _check_lengths(schedule, lengths)
    divided = in_groups(costs, schedule.groups)
    simulation = _Simulation(schedule, divided, lengths, overlap_communication=overlap_communication)
    lanes, copies = simulation.run()
    return Timeline(schedule, costs, overlap_communication, lanes, copies=copies, lengths=tuple(lengths))


def simulates_lengths(schedule: Schedule) -> bool:
    """Whether `simulate` takes lengths of the schedule's microbatches: not with copies to the host or with pairs."""
    return not (schedule.offloads or schedule.has_pairs)


def _check_lengths(schedule: Schedule, lengths: Sequence[float]) -> None:
    if len(lengths) != schedule.num_microbatches:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.num_microbatches} microbatches, but {len(lengths)} have a length"
        )
    if not simulates_lengths(schedule):
        option = "offload" if schedule.offloads else "pairs of a forward and a backward"
        raise ScheduleError(
            f"schedule {schedule.name}: {option} and lengths of microbatches are not simulated together"
        )


class _Wait(NamedTuple):
    """A result that all operations of one kind in one stage need."""

    slot: int
    """An operation of microbatch m needs the result with index `slot + m` in the list of end times."""
    num_before: int
    """Microbatch of the operation minus microbatch of the needed result, as in `Need.num_before`."""
    is_optional: bool
    """Whether the result is needed only if the schedule makes the result, as in `Need.is_optional`."""
    transit: float | None
    """Time from the completion of the result on another rank to its arrival; None if the same rank makes the result."""
    occupies: bool
    """Whether the message with the result occupies the receiver."""


class _Step(NamedTuple):
    """Properties of all operations of one kind in one stage."""

    time: float
    plain_waits: tuple[tuple[int, float | None], ...]
    """(slot, transit) of each needed result, for an operation that only waits for arrivals; empty for others."""
    waits: tuple[_Wait, ...]
    """The needed results, for an operation with a result that is optional, of another microbatch, or in a message that
    occupies the rank; empty for others."""
    slots: tuple[int, ...]
    """Indices, in the list of end times, of the operation's results for microbatch 0."""
    sending: float
    """Time for which the message with the result occupies the sender."""


class _Lane:
    """The state of a rank: the start and end times of the operations that the rank has run so far."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.free: float = 0
        """Time from which the rank is free."""
        self.steps: dict[tuple[OpKind, int], _Step] = {}
        """(kind, chunk) -> properties of the operations of the rank with this kind and chunk."""


class _Simulation:
    """Runs each rank until an operation lacks an input, and continues the rank when the input's arrival time is known.

    Planners simulate many schedules. For speed, values that are the same for all microbatches are computed once, and
    the end times of all results are in one flat list.
    """

    def __init__(
        self, schedule: Schedule, costs: StageCosts, lengths: Sequence[float], *, overlap_communication: bool
    ) -> None:
        self._schedule = schedule
        self._lengths = lengths
        self._costs = costs
        self._overlaps = overlap_communication
        self._times = costs.times
        facts = [KINDS[kind] for kind in schedule.kinds]
        results = {result for fact in facts for result in (*fact.makes, *(need.result for need in fact.needs))}
        self._rows = {result: row for row, result in enumerate(results)}
        self._width = 1 + max(map(itemgetter(1), chain.from_iterable(schedule.ops)), default=0)
        size = len(results) * schedule.num_stages * self._width
        self._ends: list[float | None] = [None] * size
        self._is_made = self._optional_results(size)
        self._links = LinkTimes.of_ranks(schedule, costs)
        self._pairs = [times_in_pairs(schedule, costs, rank) for rank in range(schedule.num_ranks)]
        self._lanes = [_Lane() for _ in schedule.ops]
        self._runnable = deque(range(schedule.num_ranks))
        self._blocked: dict[int, list[int]] = {}
        """Index in the list of end times -> ranks that wait for the result with this index."""

    def _slot(self, result: OpKind, stage: int) -> int:
        return (self._rows[result] * self._schedule.num_stages + stage) * self._width

    def _optional_results(self, size: int) -> bytearray:
        """Index of an end time -> 1 if the end time is for an optional result that the schedule makes, else 0."""
        placement, is_made = self._schedule.placement, bytearray(size)
        optional = {need.result for facts in KINDS.values() for need in facts.needs if need.is_optional}
        for rank, ops in enumerate(self._schedule.ops if optional & self._schedule.kinds else ()):
            for op in ops:
                if op.kind in optional:
                    is_made[self._slot(op.kind, placement.stage_of(rank, op.chunk)) + op.microbatch] = 1
        return is_made

    def _step(self, rank: int, kind: OpKind, chunk: int) -> _Step:
        placement, costs = self._schedule.placement, self._costs
        stage = placement.stage_of(rank, chunk)
        waits = []
        for source in sources(placement, kind, stage):
            need = source.need
            if need.is_optional and need.result not in self._schedule.kinds:
                continue
            transit = source.transit(costs) if source.is_remote else None
            occupies = not self._overlaps and not source.is_reduced
            slot = self._slot(need.result, source.stage) - need.num_before
            waits.append(_Wait(slot, need.num_before, need.is_optional, transit, occupies))
        slots = tuple(self._slot(result, stage) for result in KINDS[kind].makes)
        message = None if self._overlaps else send_after(placement, rank, Op(kind, 0, chunk))
        sending = message_time(placement, costs, rank, message)
        plain: tuple[tuple[int, float | None], ...] = ()
        if not any(wait.num_before or wait.is_optional or wait.occupies for wait in waits):
            plain, waits = tuple((wait.slot, wait.transit) for wait in waits), []
        return _Step(self._times[kind][stage], plain, tuple(waits), slots, sending)

    def run(self) -> tuple[Lanes, Lanes]:
        """Run all ranks; return rank -> operations with their times, and rank -> copies on the host link."""
        lanes, ops = self._lanes, self._schedule.ops
        while self._runnable:
            rank = self._runnable.popleft()
            lanes[rank].free = self._run_rank(rank, lanes[rank])
        if self._blocked:
            raise Deadlock(self._explain())
        timed = tuple(timed_ops(own, lane.starts, lane.ends) for own, lane in zip(ops, lanes, strict=True))
        return timed, tuple(tuple(link.copies) for link in self._links)

    def _explain(self) -> str:
        """The error message of a deadlock: one line with the ranks that wait for each other."""
        schedule, results = self._schedule, list(self._rows)
        waits_for: dict[int, tuple[OpKind, int, int]] = {}
        for slot, ranks in self._blocked.items():
            row, microbatch = divmod(slot, self._width)
            row, stage = divmod(row, schedule.num_stages)
            waits_for.update(dict.fromkeys(ranks, (results[row], stage, microbatch)))
        owners = {rank: schedule.placement.rank_of(stage) for rank, (_, stage, _) in waits_for.items()}
        steps = []
        for rank in circle(owners):
            result, stage, microbatch = waits_for[rank]
            at = schedule.ops[rank][len(self._lanes[rank].ends)]
            steps.append(f"rank {rank} at {at} waits for {result}{microbatch} of stage {stage} on rank {owners[rank]}")
        return f"schedule {schedule.name} deadlocks: {'; '.join(steps)}"

    def _run_rank(self, rank: int, lane: _Lane) -> float:
        """Run operations of `rank` until an operation lacks an input; return the time from which the rank is free."""
        ends, is_made, ops, in_pairs = self._ends, self._is_made, self._schedule.ops[rank], self._pairs[rank]
        link, lengths = self._links[rank] if self._links else None, self._lengths
        free, steps, blocked = lane.free, lane.steps, self._blocked
        for position in range(len(lane.ends), len(ops)):
            kind, microbatch, chunk = ops[position]
            step = steps.get((kind, chunk))
            if step is None:
                step = steps[kind, chunk] = self._step(rank, kind, chunk)
            time, plain_waits, waits, slots, sending = step
            start = free
            for slot, transit in plain_waits:
                result_at = ends[slot + microbatch]
                if result_at is None:
                    blocked.setdefault(slot + microbatch, []).append(rank)
                    return free
                if transit is not None and result_at + transit > start:
                    start = result_at + transit
            for slot, num_before, is_optional, transit, occupies in waits:
                if microbatch < num_before or (is_optional and not is_made[slot + microbatch]):
                    continue
                result_at = ends[slot + microbatch]
                if result_at is None:
                    blocked.setdefault(slot + microbatch, []).append(rank)
                    return free
                if transit is not None:
                    if occupies:
                        start = max(start, result_at) + transit
                    elif result_at + transit > start:
                        start = result_at + transit
            if in_pairs and ops[position] in in_pairs:
                free = self._run_in_pair(rank, position, start, lane)
                continue
            if link is not None:
                start = link.start_of(ops[position], start)
            end = start + (time * lengths[microbatch] if lengths else time)
            if link is not None:
                link.copy_after(ops[position], end)
            lane.starts.append(start)
            lane.ends.append(end)
            for slot in slots:
                ends[slot + microbatch] = end
                if slot + microbatch in blocked:
                    self._runnable.extend(blocked.pop(slot + microbatch))
            free = end + sending
        return free

    def _run_in_pair(self, rank: int, position: int, start: float, lane: _Lane) -> float:
        """Run one operation of a pair; return the time at which `rank` is free.

        The results of the forward and the backward of the pair are ready when the pair ends.
        """
        op = self._schedule.ops[rank][position]
        free = end = start + self._pairs[rank][op]
        lane.starts.append(start)
        lane.ends.append(end)
        for kind, microbatch, chunk in (
            self._schedule.ops[rank][position - 1 : position + 1] if op.kind in PAIRED else ()
        ):
            step = lane.steps[kind, chunk]
            for slot in step.slots:
                self._ends[slot + microbatch] = end
                self._runnable.extend(self._blocked.pop(slot + microbatch, ()))
            free += step.sending
        return free
