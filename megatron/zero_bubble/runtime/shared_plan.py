"""Makes all ranks of a job follow the very same plan."""

from __future__ import annotations

import torch.distributed as dist

from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import ScheduleError, validate
from megatron.zero_bubble.schedule.formats import schedule_from_json, schedule_to_json


def plan_on_first_rank(plan: RunSchedules, num_microbatches: int) -> RunSchedules:
    """Let the job's first rank make the schedule for `num_microbatches`; return the plan that holds it, on all ranks.

    A collective call of the whole job. All ranks must run the very same order, but a solver with a time limit may find
    a different one on each rank.

    Raises:
        ScheduleError: the first rank found no schedule; raised on all ranks.
    """
    answer: list[str | ScheduleError] = [""]
    if dist.get_rank() == 0:
        try:
            answer = [schedule_to_json(plan.schedule(num_microbatches))]
        except ScheduleError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ScheduleError):
        raise answer[0]
    schedule = schedule_from_json(answer[0])
    validate(schedule)
    return plan.with_shared(schedule)
