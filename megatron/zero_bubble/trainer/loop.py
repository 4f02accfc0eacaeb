"""Runs the training loop with its optimizer steps, evaluations, checkpoints and exits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.utils import get_model_config

from megatron.zero_bubble.mcore.finite import FiniteCheck
from megatron.zero_bubble.mcore.multi_token import take_losses
from megatron.zero_bubble.mcore.post_validation import StepOutcome
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.start_up import SessionError
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint import Checkpointer, TrainingState
from megatron.zero_bubble.trainer.exit_reasons import ExitReasons
from megatron.zero_bubble.trainer.forward_step import DataIterator, losses_of, make_forward_step, mean_loss
from megatron.zero_bubble.trainer.logging import StepResult, TrainingLog
from megatron.zero_bubble.trainer.records import NumericsLog, parameter_digest


class TrainingData(NamedTuple):
    """A training run's data: for each model chunk, an iterator over microbatches, or None for a chunk without data."""

    train: list[DataIterator]
    valid: list[DataIterator] | None
    """Iterators of the validation data; None if nothing is evaluated."""


class Trainer:
    """Trains until the last iteration, an exit interval, a time limit or a signal.

    With post-validation, the result of an iteration becomes known, and is logged, during the next iteration.

    Args:
        session: the started session, which runs the training steps.
        exit_reasons: the reasons to end before the last iteration; they count time from the start of the program.
    """

    def __init__(
        self,
        args: Arguments,
        state: TrainingState,
        session: Session,
        checkpointer: Checkpointer,
        log: TrainingLog,
        data: TrainingData,
        exit_reasons: ExitReasons,
    ) -> None:
        self._args = args
        self._progress, self._model, self._optimizer, self._scheduler = progress, model, optimizer, _ = state
        self._session = session
        self._checkpointer = checkpointer
        self._log = log
        self._data = data
        self._forward_backward = partial(
            session.forward_backward,
            forward_step_func=make_forward_step(args),
            model=model,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.seq_length,
        )
        self._zero_bubble = session.forward_backward_func
        self._unsettled: StepResult | None = None
        self._unlogged: StepResult | None = None
        """The result of a complete iteration that is not logged yet."""
        self._finite: FiniteCheck | None = None
        if args.checks_finite:
            self._finite = FiniteCheck(model, session.job.placement, SessionError, lambda: progress.iteration)
        if session.post_validation is not None:
            session.post_validation.settled = self._complete_unsettled
            if self._finite is not None:
                session.post_validation.check_norm = self._finite.check_norm
        elif self._finite is not None:
            self._finite.watch(optimizer)
        self._numerics: NumericsLog | None = None
        if args.log_numerics:
            self._numerics = NumericsLog(args.log_numerics, progress.iteration, session.job.log_rank)
        self._exit_reasons = exit_reasons

    def train(self) -> None:
        """Train until the last iteration or an earlier exit, and save a checkpoint at the end if `--save` is given."""
        with self._exit_reasons.signals_handled():
            self._train()
        self._log.print_summary()

    def _train(self) -> None:
        args = self._args
        for chunk in self._model:
            chunk.train()
        saved_at = self._progress.iteration
        if saved_at >= args.train_iters:
            print_rank_0(
                f" > nothing to train: the checkpoint in --load {args.load} is of iteration {saved_at}, "
                f"--train-iters is {args.train_iters}"
            )
        while self._progress.iteration < args.train_iters:
            update_num_microbatches(self._progress.consumed_train_samples, consistency_check=True)
            self._train_step()
            if self._session.replicas.changes_after(self._progress.iteration):
                self._settle()
            if self._data.valid is not None and self._progress.iteration % args.eval_interval == 0:
                self._pausing(self.evaluate)
            # With post-validation, no rank waits for other ranks at the end of an iteration.
            waits = self._session.post_validation is None
            reason = self._exit_reasons.reason(self._progress.iteration, waits=waits)
            if args.save and (reason or (args.save_interval and self._progress.iteration % args.save_interval == 0)):
                self._pausing(self._save)
                saved_at = self._progress.iteration
            if reason:
                self._settle()
                print_rank_0(f"exiting at iteration {self._progress.iteration}: {reason}")
                return
        self._settle()
        if args.save and saved_at != self._progress.iteration:
            self._save()

    def _train_step(self) -> None:
        if self._unsettled is None:
            self._zero_gradients()
        is_local = self._session.replicas.is_local
        if self._finite is not None and is_local:
            self._finite.steps_with = parallel_state.get_model_parallel_group()
        batch_size = get_current_global_batch_size()
        num_microbatches = get_num_microbatches()
        reports = self._forward_backward(data_iterator=self._data.train, num_microbatches=num_microbatches)
        self._free_unused_memory(level=1)
        self._log_unlogged()
        if self._finite is not None:
            self._finite.losses = losses_of(reports)
        self._progress.iteration += 1
        self._progress.consumed_train_samples += batch_size
        sharing = parallel_state.get_context_parallel_group() if is_local else _all_replicas()
        predictor = self._zero_bubble if self._prints_a_line() else None
        result = StepResult(
            lm_loss=mean_loss(reports, sharing),
            further_losses=take_losses(num_microbatches, sharing),
            batch_size=batch_size,
            prediction=None if predictor is None else predictor.running.prediction(num_microbatches),
            is_local=is_local,
        )
        if self._session.post_validation is None:
            self._unlogged = self._complete(result, StepOutcome(*self._optimizer.step()))
            self._log_unlogged()
        else:
            self._unsettled = result
        self._session.after_iteration()
        self._free_unused_memory(level=2)

    def _free_unused_memory(self, level: int) -> None:
        if self._args.empty_unused_memory_level >= level:
            torch.cuda.empty_cache()

    def _zero_gradients(self) -> None:
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _complete_unsettled(self, outcome: StepOutcome) -> None:
        """Complete the previous iteration with the outcome of its validated optimizer step, and zero the gradients.

        The schedule calls `_complete_unsettled` while messages from neighboring ranks may be in flight. Therefore
        `_complete_unsettled` must not wait for another rank or for the whole device, and prints no log line. The
        training loop prints the log line after the schedule has run.
        """
        assert self._unsettled is not None
        result, self._unsettled = self._unsettled, None
        self._unlogged = self._complete(result, outcome, finished_at=time.perf_counter())
        self._zero_gradients()

    def _complete(self, result: StepResult, outcome: StepOutcome, finished_at: float | None = None) -> StepResult:
        """Step the learning-rate scheduler after an iteration, and collect this rank's values for the log line."""
        if outcome.was_updated:
            self._scheduler.step(increment=result.batch_size)
        self._session.replicas.after_step(self._progress.iteration)
        digest = None
        if self._numerics is not None:
            self._gather_parameters()
            digest = parameter_digest(self._model)
        return replace(
            result,
            outcome=outcome,
            # As in Megatron-LM, this is the learning rate after the scheduler's step.
            learning_rate=get_canonical_lr_for_logging(self._optimizer.param_groups) or 0.0,
            loss_scale=self._optimizer.get_loss_scale().item(),
            finished_at=finished_at,
            mean_step=self._zero_bubble.observer.take_mean() if self._zero_bubble and self._prints_a_line() else None,
            parameter_digest=digest,
        )

    def _log_unlogged(self) -> None:
        """Log the last complete iteration unless it has been logged already; a collective call."""
        if self._unlogged is None:
            return
        result, self._unlogged = self._unlogged, None
        if result.mean_step is not None:
            assert self._zero_bubble is not None
            measured = self._zero_bubble.measured_time(result.mean_step)
            result = replace(result, measured=measured, orders=self._zero_bubble.step_plans.take_times())
        if self._prints_a_line():
            result = replace(result, waits=self._session.replicas.take_waits())
        self._log.record(result)
        if self._numerics is not None:
            assert result.parameter_digest is not None
            norm = result.outcome.grad_norm
            self._numerics.write(self._progress.iteration, result.lm_loss, norm, result.parameter_digest)

    def _gather_parameters(self) -> None:
        """With `--overlap-param-gather`, gather the parameters now instead of during the next forward."""
        if self._args.overlap_param_gather:
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)

    def _save(self) -> None:
        self._session.replicas.average_all(self._progress.iteration, with_states=True)
        if self._finite is not None:
            self._finite.check_weights()
        self._gather_parameters()
        self._checkpointer.save()

    def _settle(self) -> None:
        """Validate and log the last optimizer step, if this is not done yet; parameters may be read only afterwards."""
        self._session.settle()
        self._log_unlogged()

    def _prints_a_line(self) -> bool:
        return self._progress.iteration % self._args.log_interval == 0

    def evaluate(self) -> None:
        """Print the mean loss over `--eval-iters` iterations of validation data; stop early if training has to exit."""
        args = self._args
        self._session.replicas.average_all(self._progress.iteration)
        for chunk in self._model:
            chunk.eval()
        num_microbatches = get_num_microbatches()
        reports, reason = [], None
        # The timers measure only training steps.
        with replaced(get_model_config(self._model[0]), "timers", None), torch.no_grad():
            for _ in range(args.eval_iters):
                reason = self._exit_reasons.reason_in_evaluation()
                if reason:
                    break
                reports += self._forward_backward(
                    data_iterator=self._data.valid, num_microbatches=num_microbatches, forward_only=True
                )
        # Also after an early stop, so that a resumed job evaluates on the same samples as an uninterrupted job.
        self._progress.consumed_valid_samples += args.eval_iters * get_current_global_batch_size()
        for chunk in self._model:
            chunk.train()
        if self._finite is not None:
            self._finite.check_losses(losses_of(reports))
        if reason:
            print_rank_0(f" > no validation loss at iteration {self._progress.iteration}: {reason}")
        else:
            self._log.record_validation(mean_loss(reports, _all_replicas()))

    def _pausing(self, action: Callable[[], None]) -> None:
        """Validate and log the last optimizer step; run `action` outside of the logged iteration time."""
        self._settle()
        with self._log.untimed():
            action()


def _all_replicas() -> dist.ProcessGroup:
    """Return the group of the data- and context-parallel ranks that hold the same part of the model as this rank."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
