"""The results of an iteration, from its backward to its log line."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron.zero_bubble.mcore.post_validation import StepOutcome
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.runtime.recorder import StepTime
from megatron.zero_bubble.training.logging import StepResult


@dataclass(frozen=True)
class UnsettledIteration:
    """The results of an iteration that are known before its step is settled."""

    lm_loss: float | None
    further_losses: tuple[float, ...]
    batch_size: int
    prediction: Prediction | None
    is_local: bool
    """Whether losses and norm are those of this replica alone."""


@dataclass(frozen=True)
class UnloggedIteration:
    """This rank's results of an iteration whose step is settled and which is not logged yet."""

    result: StepResult
    mean_step: StepTime | None
    """Mean time of the steps since the last line, in iterations that print one; None with megatron-core's schedule."""
    parameter_digest: str | None
    """Digest of this rank's parameters; None without `--log-numerics`."""


def result_of(
    iteration: UnsettledIteration, outcome: StepOutcome, optimizer: MegatronOptimizer, finished_at: float | None
) -> StepResult:
    """The results for the log of an iteration whose step is settled; `finished_at` is None if that is just now."""
    prediction = iteration.prediction
    return StepResult(
        lm_loss=iteration.lm_loss,
        further_losses=iteration.further_losses,
        grad_norm=outcome.grad_norm,
        num_zeros=outcome.num_zeros,
        # Megatron-LM logs the rate after the scheduler's step.
        learning_rate=get_canonical_lr_for_logging(optimizer.param_groups) or 0.0,
        loss_scale=optimizer.get_loss_scale().item(),
        batch_size=iteration.batch_size,
        was_skipped=not outcome.was_updated,
        predicted_idle=prediction.idle if prediction else None,
        predicted_gain=prediction.gain if prediction else None,
        was_rolled_back=outcome.was_amended,
        num_redone_forwards=outcome.num_redone_forwards,
        is_local=iteration.is_local,
        finished_at=finished_at,
    )
