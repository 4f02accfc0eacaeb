"""Checks and builds the optimizer step of `--zero-bubble-post-validation`, and estimates what it gains."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.job.start_up import print_rank_0
from megatron.zero_bubble.mcore.optimizer import check_optimizer, torch_optimizers
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.rollback import make_rollback
from megatron.zero_bubble.schedule import Placement, iteration_time, with_post_validation
from megatron.zero_bubble.schedule.generators import default_costs
from megatron.zero_bubble.schedule.plan import Plan

FLAG = "--zero-bubble-post-validation"
_INVERSE, _USE_SNAPSHOT = "--zero-bubble-rollback inverse", "use snapshot"
_WINDOW = 100
_TOO_OFTEN = 1 / 3


def check_post_validation(flags: JobFlags) -> None:
    """Raise `ValueError` for a flag that post-validation does not support; the message names both flags and why."""
    if not flags.zero_bubble_post_validation:
        return
    reasons = {
        "--log-num-zeros-in-grad: the zeros are counted over all ranks before the step": flags.log_num_zeros_in_grad,
        "--timing-log-level 2: its timers make every step wait for all ranks": flags.timing_log_level > 1,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(f"{FLAG} does not work with {reason}")
    if flags.zero_bubble_rollback == "inverse" and flags.optimizer != "adam":
        raise ValueError(
            f"{_INVERSE}: only AdamW can be inverted, and --optimizer is {flags.optimizer}: {_USE_SNAPSHOT}"
        )


def build_post_validation(
    flags: JobFlags, plan: Plan | None, optimizer: MegatronOptimizer, model: Sequence[Any]
) -> PostValidation | None:
    """The post-validation of an optimizer; None if the flags do not ask for it, or with a single pipeline rank.

    Raises:
        ValueError: post-validation does not support the optimizer, or the rollback cannot invert it.
    """
    if not flags.zero_bubble_post_validation:
        return None
    if flags.pipeline_model_parallel_size == 1:
        print_rank_0(f" > {FLAG} has no effect with --pipeline-model-parallel-size 1: no rank waits for another stage")
        return None
    assert plan is not None, "checked with the flags"
    try:
        check_optimizer(optimizer)
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from error
    try:
        rollback = make_rollback(
            "inverse" if flags.zero_bubble_rollback == "inverse" else "snapshot",
            torch_optimizers(optimizer),
            on_host=flags.zero_bubble_rollback_on_host,
        )
    except ValueError as error:
        raise ValueError(f"{_INVERSE}: {error}: {_USE_SNAPSHOT}") from error
    print_rank_0(_gain(flags, plan))
    return PostValidation(optimizer, rollback, model)


def _gain(flags: JobFlags, plan: Plan) -> str:
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


class RollbackWatch:
    """Warns when so many steps are amended that post-validation costs more than it gains."""

    def __init__(self) -> None:
        self._amended: deque[bool] = deque(maxlen=_WINDOW)

    def warning(self, was_amended: bool) -> str | None:
        """Record one step, and return a warning if at least a third of the last 100 steps were amended, else None.

        Amending runs forwards again, which takes about the time that is gained, and takes the step twice: from one
        amended step in three on, the gain is doubtful.
        """
        self._amended.append(was_amended)
        rate = sum(self._amended) / _WINDOW
        if len(self._amended) < _WINDOW or rate < _TOO_OFTEN:
            return None
        self._amended.clear()
        return (
            f" > {FLAG} amended {rate:.0%} of the last {_WINDOW} steps: it costs more than it gains; "
            "raise --clip-grad or leave out {FLAG}"
        )
