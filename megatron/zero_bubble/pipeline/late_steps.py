"""Takes optimizer steps before the norm of all gradients is known; repeats a step if the gradients had to be clipped.

A rank takes the optimizer's step as soon as the rank's own gradients are complete. During the forwards of the next
training step, the rank sends the norms of its gradients to all ranks in the background. Before the first backward of
the next training step, the rank waits for the norms of all ranks. If the gradients had to be clipped, the rank undoes
the optimizer's step, clips the gradients, takes the optimizer's step again, and repeats the forwards of the next
training step. Parameters, losses and gradient norms are bitwise the same as if every optimizer step waited for the norm
of all gradients. If the gradients of many recent steps had to be clipped, the next optimizer step waits for the norm of
all gradients (see `RecentSteps`).
"""

from __future__ import annotations

import math
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.batches import Load
from megatron.zero_bubble.pipeline.failures import Failure, failing_as
from megatron.zero_bubble.pipeline.gradients import LayerNorm, total_norm
from megatron.zero_bubble.pipeline.interconnect import Agreement, Interconnect
from megatron.zero_bubble.pipeline.partial_model import PartialModel
from megatron.zero_bubble.pipeline.rank_steps import RankSteps
from megatron.zero_bubble.runtime.joint import attempt
from megatron.zero_bubble.runtime.recent_steps import RecentSteps
from megatron.zero_bubble.runtime.rollback import Snapshot, settings_of, with_settings
from megatron.zero_bubble.runtime.stage import Stage


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of a training step, the same on all ranks."""

    loss: torch.Tensor
    """The mean loss over the microbatches."""
    grad_norm: torch.Tensor
    """The norm of all gradients before clipping."""
    was_amended: bool = False
    """Whether validation took or repeated the optimizer's step; false if the step waited for all gradient norms."""


class StepReport(NamedTuple):
    """The values that a rank sends to all other ranks at the end of a training step."""

    norms: list[LayerNorm]
    loss: torch.Tensor | None
    """Loss of the step; None if the last stage is not on the rank."""
    failure: Failure | None
    has_stepped: bool


@dataclass
class _UnvalidatedStep:
    """A training step whose optimizer step has not been validated yet."""

    reports: Future[list[StepReport]]
    report: StepReport
    """The report of this rank."""
    optimizer: torch.optim.Optimizer
    max_norm: float
    waits: bool
    """Whether every rank delays the optimizer's step until the norm of all gradients is known."""
    cause: BaseException | None
    """The error of this rank's failed forward or optimizer step."""
    settings: list[dict[str, Any]]
    """Settings of the parameter groups after the optimizer's step; a learning-rate scheduler may change them later."""


class LateSteps:
    """Runs the training steps of one rank, and validates each optimizer step during the next training step.

    Creating an instance is a collective call of all ranks.
    """

    def __init__(self, steps: RankSteps, interconnect: Interconnect, model: PartialModel) -> None:
        self._model = model
        self._stage, self._messages, self._tied = steps.stage, steps.messages, steps.tied
        self._stage.validate = self._validate_before_backward
        self._executor = steps.executor(post_validation=True)
        # A background thread uses this agreement, and no other code may use it at the same time.
        self._agreement = Agreement(interconnect)
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="post-validation")
        self._snapshots: weakref.WeakKeyDictionary[torch.optim.Optimizer, Snapshot] = weakref.WeakKeyDictionary()
        self._next_optimizer: torch.optim.Optimizer
        self._pending: _UnvalidatedStep | None = None
        self._outcome: TrainingOutcome | None = None
        self._recent = RecentSteps()

    def take_outcome(self) -> TrainingOutcome | None:
        """Return the outcome of the last validated training step; None if an earlier call has returned this outcome."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def run(self, load: Load, optimizer: torch.optim.Optimizer) -> None:
        """Run the forwards and backwards of a training step; validate the previous step before the first backward.

        If the optimizer's step of the previous training step waits for the norm of all gradients, the previous training
        step is validated before the first forward of the new training step.

        Args:
            load: function that returns the step's microbatches, called on the ranks of the first and the last stage.
            optimizer: the optimizer that the caller will pass to `LateSteps.step` for the same training step.
        """
        self._next_optimizer = optimizer
        if self._pending is not None and self._pending.waits:
            self.validate()
        autocast = Autocast.current(self._stage.device.type)
        with autocast.only_in_forwards():
            self._messages.begin_as_before(load, autocast)
            self._stage.remember()
            self._executor.run(cast(Stage, self._stage))

    def _validate_before_backward(self) -> bool:
        was_wrong = self.validate()
        if not self._recent.next_waits:
            # The user may change parameters between two steps; from now to the optimizer's step, no code changes them.
            self._snapshot(self._next_optimizer).prepare()
        for tied in self._tied:
            tied.begin_step()
        return was_wrong

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Take the optimizer's step unless it must wait for validation; start to send this rank's `StepReport`.

        The optimizer's step is not taken if a forward has failed on this rank, if optimizer steps wait for the norm of
        all gradients, or if this rank's gradients alone have a norm that requires clipping.
        """
        assert self._pending is None, "the last step has to be validated first"
        norms = self._model.gradient_norms()
        failure, loss = Failure.first_of(self._stage.failures), self._stage.end()
        cause: BaseException | None = self._stage.cause
        waits = self._recent.next_waits
        has_stepped = failure is None and not waits and not _clips(total_norm(norms, self._stage.device), max_norm)
        if has_stepped:
            self._snapshot(optimizer).before_step()
            if (error := take_step(optimizer)) is not None:
                failure, cause = Failure(0, self._stage.stages[0], str(error)), error.__cause__
        report = StepReport(norms, None if loss is None else loss.cpu(), failure, has_stepped)
        reports = self._lane.submit(self._agreement.gather, report)
        settings = settings_of(optimizer.param_groups)
        self._pending = _UnvalidatedStep(reports, report, optimizer, max_norm, waits, cause, settings)

    def validate(self) -> bool:
        """Wait for the `StepReport`s of all ranks, correct the last optimizer step if necessary, and drop gradients.

        If the gradients have to be clipped, or if a rank has not taken the optimizer's step, every rank takes the step
        with clipped gradients; a rank that has already taken the step undoes the step first.

        Returns:
            Whether `validate` has taken or repeated the last optimizer step; the same value on all ranks.

        Raises:
            ValueError: on all ranks, if a forward or an optimizer's step has failed, or if an optimizer's step cannot
                be repeated because the user has changed gradients. A rank that has taken the optimizer's step before
                the call of `validate` undoes this step before the error is raised.
        """
        if self._pending is None:
            return False
        pending, self._pending = self._pending, None
        reports = pending.reports.result()
        failure = Failure.first_of(report.failure for report in reports if report.failure is not None)
        norm = total_norm([entry for report in reports for entry in report.norms], self._stage.device)
        clips = _clips(norm, pending.max_norm)
        was_wrong = clips or failure is not None or not all(report.has_stepped for report in reports)
        if was_wrong:
            with with_settings(pending.optimizer.param_groups, pending.settings):
                if pending.report.has_stepped:
                    self._snapshot(pending.optimizer).undo()
                if failure is not None:
                    raise ValueError(failure.problem) from pending.cause
                self._agreement.together(lambda: _check_unchanged(pending.report.norms, self._model.gradient_norms()))
                with torch.autocast(self._stage.device.type, enabled=False):
                    if clips:
                        torch.nn.utils.clip_grads_with_norm_(self._model.own_parameters(), pending.max_norm, norm)
                    self._agreement.raise_any(take_step(pending.optimizer))
        pending.optimizer.zero_grad()
        self._recent.record(clips)
        loss = next(report.loss for report in reports if report.loss is not None)
        self._outcome = TrainingOutcome(loss, norm, was_wrong and not pending.waits)
        return was_wrong

    def _snapshot(self, optimizer: torch.optim.Optimizer) -> Snapshot:
        if optimizer not in self._snapshots:
            self._snapshots[optimizer] = Snapshot([optimizer])
        return self._snapshots[optimizer]

    def close(self) -> None:
        """Wait until the `StepReport`s of all ranks have arrived, and end the background thread."""
        self._lane.shutdown()


def take_step(optimizer: torch.optim.Optimizer) -> Exception | None:
    """Take the optimizer's step; if the step fails, return an error that can be sent to other ranks."""
    step = failing_as(f"{type(optimizer).__name__}.step()")(optimizer.step)
    return attempt(step)[1]


def _check_unchanged(before: list[LayerNorm], now: list[LayerNorm]) -> None:
    pairs = zip((norm for *_, norm in before), (norm for *_, norm in now), strict=False)
    if len(before) != len(now) or not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs):
        raise ValueError(
            "with post_validation=True gradients may not change before the next step validates them: choose an "
            "optimizer whose step() does not change gradients, and call zero_grad() only after settle()"
        )


def _clips(norm: torch.Tensor, max_norm: float) -> bool:
    """Tell whether gradients whose total norm is `norm` have to be clipped."""
    return not (max_norm == math.inf or bool(max_norm / (norm + 1e-6) >= 1.0))
