"""(Schedule, StageCosts) -> Timeline: when every operation runs, and what that costs."""

from __future__ import annotations

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.graph import Node, arrivals, message_time, nodes_of, replay, send_after
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.streams import HardwareQueues, StreamReplay
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    *,
    overlap_communication: bool = True,
    hardware_queues: HardwareQueues | None = None,
) -> Timeline:
    """Run the compute operations of `schedule`, lowered or not, with the times of `costs`.

    Every rank runs its operations in order, each as soon as the rank is free and its inputs are there.
    A tensor that crosses ranks takes `costs.time_comm` of its edge. If communication overlaps, both ranks go on
    computing meanwhile. If it does not, it occupies both: the sender for that time right after the
    operation that made the tensor, the receiver for that time right before the one that uses it. The state
    that VALIDATE waits for takes as long as the slowest message, and occupies nobody.

    With `hardware_queues` a lowered schedule runs on NCCL's streams: a message also waits for its receive to be posted
    and for the one before it on its channel, and with one queue a computation for what was launched before it.

    Nothing but sums and maxima of the given numbers is computed, so that integers and fractions give
    exact results. Raises `ScheduleError` if the costs are for another number of stages, `InvalidSchedule` if a
    schedule that is to run on streams lacks a message, and `Deadlock`.
    """
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.num_stages} stages, but the costs are for {costs.num_stages}"
        )
    if hardware_queues is not None:
        assert overlap_communication, "on streams messages overlap with computations"
        lanes_on_streams = StreamReplay(schedule, costs).run(hardware_queues)
        return Timeline(schedule.without_communication(), costs, True, lanes_on_streams, hardware_queues)
    schedule = schedule.without_communication()
    placement = schedule.placement
    times = costs.times()
    ends: dict[Node, float] = {}
    free: list[float] = [0] * schedule.num_ranks
    lanes: list[list[TimedOp]] = [[] for _ in schedule.ops]
    for rank, position in replay(schedule):
        op = schedule.ops[rank][position]
        stage = placement.stage_of(rank, op.chunk)
        start = free[rank]
        for arrival in arrivals(schedule, rank, op):
            made, time = ends[arrival.node], arrival.time(costs)
            overlaps = overlap_communication or arrival.is_reduced
            start = max(start, made + time) if overlaps else max(start, made) + time
        end = start + times[op.kind][stage]
        lanes[rank].append(TimedOp(op, start, end))
        ends.update(dict.fromkeys(nodes_of(placement, rank, op), end))
        sending = 0 if overlap_communication else message_time(placement, costs, rank, send_after(placement, rank, op))
        free[rank] = end + sending
    return Timeline(schedule, costs, overlap_communication, tuple(tuple(lane) for lane in lanes))
