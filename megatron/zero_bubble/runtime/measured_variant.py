"""Changes a schedule so that a training step measures all costs that planning needs."""

from __future__ import annotations

from megatron.zero_bubble.planner.fused_backwards import with_some_backwards_fused
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import Schedule
from megatron.zero_bubble.schedule.host_link import with_copies_everywhere
from megatron.zero_bubble.schedule.pairs import half_apart
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation_everywhere


def measured_variant(schedule: Schedule, plan: RunSchedules) -> Schedule:
    """Return a variant of `schedule` in which a training step measures all costs that planning needs.

    In the variant, every stage recomputes if the plan allows recomputation, and every stage copies activations to the
    host if the plan allows offload. If `schedule` runs a forward and a backward as one operation, the variant runs some
    forwards and backwards of every chunk separately. If every forward of `schedule` is a separate operation and the run
    uses the schedule `auto`, the variant replaces some B and W by fused backwards (BW).
    """
    if schedule.has_pairs:
        schedule = half_apart(schedule)
    elif plan.adapts and plan.name == "auto":
        schedule = with_some_backwards_fused(schedule)
    if plan.recompute is not Recompute.NONE:
        schedule = with_recomputation_everywhere(schedule)
    return with_copies_everywhere(schedule) if plan.offloads else schedule
