"""Says which flags `--zero-bubble-post-validation` does not support, and what it gains. Imports no megatron.core."""

from __future__ import annotations

from megatron.zero_bubble.mcore.compatibility.compatibility_table import refuse_with_features
from megatron.zero_bubble.mcore.compatibility.setting_rows import Feature
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import Placement, iteration_time, with_post_validation
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.session.job_flags import JobFlags

FLAG = "--zero-bubble-post-validation"
INVERSE, USE_SNAPSHOT = "--zero-bubble-rollback inverse", "use snapshot"


def check_post_validation(flags: JobFlags) -> None:
    """Raise `ValueError` for a flag that post-validation does not support; the message names both flags and why."""
    if not flags.zero_bubble_post_validation:
        return
    refuse_with_features(flags, [Feature.POST_VALIDATION])
    if flags.zero_bubble_rollback == "inverse" and flags.optimizer != "adam":
        raise ValueError(f"{INVERSE}: only AdamW can be inverted, and --optimizer is {flags.optimizer}: {USE_SNAPSHOT}")


def gain_of_post_validation(flags: JobFlags, plan: RunSchedules) -> str:
    """A line that says what post-validation gains with the plan's schedule if F, B and W take equally long."""
    schedule = plan.schedule(flags.most_microbatches)
    costs = default_costs(schedule.placement)
    without, with_it = (iteration_time(s, costs) for s in (schedule, with_post_validation(schedule, costs)))
    gain = 1 - with_it / without
    if gain < 0.001:
        return f" > {FLAG} gains nothing with schedule {schedule.name}: its ranks end an iteration at the same time"
    text = f" > {FLAG}: an iteration of schedule {schedule.name} is {gain:.1%} shorter with equal F, B and W"
    awaited = awaited_by_the_first_stage(flags, schedule.placement)
    return text if awaited is None else f"{text}; but the first stage waits for the last, because {awaited}"


def awaited_by_the_first_stage(flags: JobFlags, placement: Placement) -> str | None:
    """What the first stage's step needs from the end of the last stage, or None.

    While the first stage waits for this, iterations cannot overlap.
    """
    if placement.kind == "v":
        return None  # The first and the last stage are on one rank.
    if not flags.untie_embeddings_and_output_weights or flags.mtp_num_layers is not None:
        return "the gradients of tied embeddings are summed over both"
    if flags.calculate_per_token_loss:
        return "--calculate-per-token-loss needs the number of tokens from the last"
    return None
