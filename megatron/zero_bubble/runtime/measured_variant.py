"""Changes a schedule so that a step measures every cost of a later plan."""

from __future__ import annotations

from megatron.zero_bubble.planner.fused_backwards import with_some_backwards_fused
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import Schedule
from megatron.zero_bubble.schedule.host_link import with_copies_everywhere
from megatron.zero_bubble.schedule.pairs import PAIRED, half_apart
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation_everywhere


def measured_variant(schedule: Schedule, plan: RunSchedules) -> Schedule:
    """Return the variant of a schedule of `plan` that measures all costs.

    Every stage recomputes if the model may recompute, and copies activations to the host if offload is allowed. If
    `schedule` has pairs, some forwards and backwards of every chunk run separately. In a schedule of `auto`, some
    backwards are fused.
    """
    if not schedule.kinds.isdisjoint(PAIRED):
        schedule = half_apart(schedule)
    elif plan.adapts and plan.name == "auto":
        schedule = with_some_backwards_fused(schedule)
    if plan.recompute is not Recompute.NONE:
        schedule = with_recomputation_everywhere(schedule)
    return with_copies_everywhere(schedule) if plan.offloads else schedule
