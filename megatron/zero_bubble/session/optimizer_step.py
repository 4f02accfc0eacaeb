"""Builds the optimizer step of `--zero-bubble-post-validation`, and watches how often it is amended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from megatron.zero_bubble.mcore.optimizer import check_optimizer, torch_optimizers
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.rollback import make_rollback
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.post_validation_flags import FLAG, INVERSE, USE_SNAPSHOT, gain_of_post_validation
from megatron.zero_bubble.session.reports import print_rank_0

_WINDOW = 100
_TOO_OFTEN = 1 / 3


def build_post_validation(
    flags: JobFlags, plan: RunSchedules | None, optimizer: MegatronOptimizer, model: Sequence[Any]
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
        raise ValueError(f"{INVERSE}: {error}: {USE_SNAPSHOT}") from error
    print_rank_0(gain_of_post_validation(flags, plan))
    return PostValidation(optimizer, rollback, model)


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
            f"raise --clip-grad or leave out {FLAG}"
        )
