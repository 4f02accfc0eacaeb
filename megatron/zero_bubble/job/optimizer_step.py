"""`--zero-bubble-post-validation`: what it can run with, what it is made of, and what it gains."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from megatron.zero_bubble.mcore.optimizer import check_optimizer, torch_optimizers
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.rollback import make_rollback
from megatron.zero_bubble.schedule import Placement, iteration_time, with_post_validation
from megatron.zero_bubble.schedule.generators import default_costs
from megatron.zero_bubble.schedule.plan import Plan
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.initialize import print_rank_0

FLAG = "--zero-bubble-post-validation"
_INVERSE, _USE_SNAPSHOT = "--zero-bubble-rollback inverse", "use snapshot"
_WINDOW = 100
_TOO_OFTEN = 1 / 3


def check_post_validation(args: Arguments) -> None:
    """Raise `ValueError` for what cannot work with post-validation: one line that names both flags and the reason."""
    if not args.zero_bubble_post_validation:
        return
    reasons = {
        "--log-num-zeros-in-grad: the zeros are counted over all ranks before the step": args.log_num_zeros_in_grad,
        "--timing-log-level 2: its timers wait for all ranks around the step": args.timing_log_level > 1,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(f"{FLAG} and {reason}")
    if args.zero_bubble_rollback == "inverse" and args.optimizer != "adam":
        raise ValueError(
            f"{_INVERSE}: only AdamW can be inverted, and --optimizer is {args.optimizer}: {_USE_SNAPSHOT}"
        )


def build_post_validation(
    args: Arguments, plan: Plan | None, optimizer: MegatronOptimizer, model: Sequence[Any]
) -> PostValidation | None:
    """None where it was not asked for, or with a single pipeline rank.

    Raises:
        ValueError: the optimizer steps in another way, or cannot be inverted.
    """
    if not args.zero_bubble_post_validation:
        return None
    if args.pipeline_model_parallel_size == 1:
        print_rank_0(f" > {FLAG} has no effect with --pipeline-model-parallel-size 1: no rank waits for another stage")
        return None
    assert plan is not None, "checked with the flags"
    try:
        check_optimizer(optimizer)
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from error
    try:
        rollback = make_rollback(
            args.zero_bubble_rollback or "snapshot",
            torch_optimizers(optimizer),
            on_host=args.zero_bubble_rollback_on_host,
        )
    except ValueError as error:
        raise ValueError(f"{_INVERSE}: {error}: {_USE_SNAPSHOT}") from error
    print_rank_0(_gain(args, plan))
    return PostValidation(optimizer, rollback, model)


def _gain(args: Arguments, plan: Plan) -> str:
    """What the schedule gains in units of F = B = W, before anything is measured."""
    assert args.global_batch_size is not None
    schedule = plan.schedule(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    costs = default_costs(schedule.placement)
    without, with_it = (iteration_time(s, costs) for s in (schedule, with_post_validation(schedule, costs)))
    gain = 1 - with_it / without
    if gain < 0.001:
        return f" > {FLAG} gains nothing with schedule {schedule.name}: its ranks end an iteration together"
    text = f" > {FLAG}: an iteration of schedule {schedule.name} is {gain:.1%} shorter with equal F, B and W"
    awaited = awaited_by_the_first_stage(args, schedule.placement)
    return text if awaited is None else f"{text}; but {awaited}, which the first one waits for"


def awaited_by_the_first_stage(args: Arguments, placement: Placement) -> str | None:
    """What the first stage cannot step without and the last one has at its end, so that iterations do not interlock."""
    if placement.kind == "v":
        return None  # Both are on one rank.
    if not args.untie_embeddings_and_output_weights or args.mtp_num_layers is not None:
        return "tied embeddings are summed over the last stage at its end"
    if args.calculate_per_token_loss:
        return "--calculate-per-token-loss counts tokens on the last stage at its end"
    return None


class RollbackWatch:
    """Says when so many steps have to be amended that stepping first costs more than it gains."""

    def __init__(self) -> None:
        self._amended: deque[bool] = deque(maxlen=_WINDOW)

    def warning(self, was_amended: bool) -> str | None:
        """Takes in a step; once in a while a line for the user.

        The forwards that are run again take about the time that is gained, and the step is taken twice: from
        one amended step in three on the gain is doubtful.
        """
        self._amended.append(was_amended)
        rate = sum(self._amended) / _WINDOW
        if len(self._amended) < _WINDOW or rate < _TOO_OFTEN:
            return None
        self._amended.clear()
        return (
            f" > {FLAG} amended {rate:.0%} of the last {_WINDOW} steps: it costs more than it gains; "
            "raise --clip-grad or leave it out"
        )
