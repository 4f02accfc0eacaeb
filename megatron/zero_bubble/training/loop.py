"""The training loop: steps, evaluation, checkpoints and exits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.zero_bubble.job.optimizer_step import RollbackWatch
from megatron.zero_bubble.job.session import Session
from megatron.zero_bubble.job.start_up import print_rank_0
from megatron.zero_bubble.mcore.finite import FiniteCheck
from megatron.zero_bubble.mcore.multi_token import take_losses
from megatron.zero_bubble.mcore.post_validation import StepOutcome
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.between_iterations import BetweenIterations
from megatron.zero_bubble.training.checkpoint import Checkpointer
from megatron.zero_bubble.training.data import DataConfig
from megatron.zero_bubble.training.exit_reasons import ExitReasons
from megatron.zero_bubble.training.forward_step import DataIterator, losses_of, make_forward_step, mean_loss
from megatron.zero_bubble.training.iteration_results import UnloggedIteration, UnsettledIteration, result_of
from megatron.zero_bubble.training.logging import TrainingLog
from megatron.zero_bubble.training.numerics import NumericsLog, parameter_digest
from megatron.zero_bubble.training.progress import Progress, TrainingError


class Trainer:
    """Trains until the last iteration, an exit interval, a time limit or a signal.

    With post-validation the outcome of an iteration is known, and logged, in the next one.

    Args:
        session: runs the steps; it is started.
        train_data: iterators over microbatches, one for each model chunk; None for a chunk that needs no data.
        valid_data: the same for evaluation; None for no evaluation.
    """

    def __init__(
        self,
        args: Arguments,
        progress: Progress,
        session: Session,
        model: list[Any],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        checkpointer: Checkpointer,
        log: TrainingLog,
        data_config: DataConfig,
        train_data: list[DataIterator],
        valid_data: list[DataIterator] | None,
    ) -> None:
        self._args = args
        self._progress = progress
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._forward_backward = partial(
            session.forward_backward,
            forward_step_func=make_forward_step(data_config, checks_finite=args.checks_finite),
            model=model,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.seq_length,
        )
        self._zero_bubble = session.forward_backward_func
        self._unsettled: UnsettledIteration | None = None
        self._unlogged: UnloggedIteration | None = None
        self._watch = RollbackWatch()
        self._finite: FiniteCheck | None = None
        if args.checks_finite:
            self._finite = FiniteCheck(model, session.job.placement, TrainingError, lambda: progress.iteration)
        if session.post_validation is not None:
            session.post_validation.settled = self._complete_unsettled
            if self._finite is not None:
                session.post_validation.check_norm = self._finite.check_norm
        elif self._finite is not None:
            self._finite.watch(optimizer)
        self._train_data = train_data
        self._valid_data = valid_data
        self._checkpointer = checkpointer
        self._log = log
        self._numerics: NumericsLog | None = None
        if args.log_numerics:
            self._numerics = NumericsLog(args.log_numerics, progress.iteration, session.job.log_rank)
        # With post-validation no rank waits for other ranks at an iteration's end.
        self._exit_reasons = ExitReasons(args, waits=session.post_validation is None)
        self._between = BetweenIterations(args)

    def train(self) -> None:
        """Train until an exit, and save at the end if `--save` was given."""
        with self._exit_reasons.signals_handled(), self._between.training():
            self._train()
        self._log.print_summary()

    def _train(self) -> None:
        args = self._args
        for chunk in self._model:
            chunk.train()
        saved_at = self._progress.iteration
        assert args.train_iters is not None
        if saved_at >= args.train_iters:
            print_rank_0(
                f" > nothing to train: the checkpoint in --load {args.load} is of iteration {saved_at}, "
                f"--train-iters is {args.train_iters}"
            )
        while self._progress.iteration < args.train_iters:
            update_num_microbatches(self._progress.consumed_train_samples, consistency_check=True)
            self._between.before_iteration(self._progress.iteration)
            self._train_step()
            if self._session.replicas.changes_after(self._progress.iteration):
                self._settle()
            self._between.after_iteration(self._progress.iteration)
            if self._valid_data is not None and self._progress.iteration % args.eval_interval == 0:
                self._pausing(self.evaluate)
            reason = self._exit_reasons.reason(self._progress.iteration)
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
        reports = self._forward_backward(
            data_iterator=self._train_data, num_microbatches=num_microbatches, forward_only=False
        )
        self._between.after_backward()
        self._log_unlogged()
        if self._finite is not None:
            self._finite.losses = losses_of(reports)
        self._progress.iteration += 1
        self._progress.consumed_train_samples += batch_size
        sharing = parallel_state.get_context_parallel_group() if is_local else _all_replicas()
        iteration = UnsettledIteration(
            mean_loss(reports, sharing),
            take_losses(num_microbatches, sharing),
            batch_size,
            self._prediction(num_microbatches),
            is_local,
        )
        if self._session.post_validation is None:
            self._unlogged = self._complete(iteration, StepOutcome(*self._optimizer.step()))
            self._log_unlogged()
        else:
            self._unsettled = iteration
        self._session.after_iteration(self._progress.iteration, num_microbatches)

    def _zero_gradients(self) -> None:
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _complete_unsettled(self, outcome: StepOutcome) -> None:
        """Complete the last iteration once its step is settled, and zero its gradients.

        This runs inside the schedule, while messages of neighbouring ranks may be under way that are received only
        later. It must not wait for another rank or for the whole device, so the log line follows after the schedule.
        """
        assert self._unsettled is not None
        iteration, self._unsettled = self._unsettled, None
        self._unlogged = self._complete(iteration, outcome, finished_at=time.perf_counter())
        self._zero_gradients()

    def _complete(
        self, iteration: UnsettledIteration, outcome: StepOutcome, finished_at: float | None = None
    ) -> UnloggedIteration:
        """Step the scheduler after an iteration's step, and collect this rank's values for the log line."""
        if outcome.was_updated:
            self._scheduler.step(increment=iteration.batch_size)
        self._session.replicas.after_step(self._progress.iteration)
        result = result_of(iteration, outcome, self._optimizer, finished_at)
        mean_step = self._zero_bubble.observer.take_mean() if self._zero_bubble and self._prints_a_line() else None
        digest = None
        if self._numerics is not None:
            self._gather_parameters()
            digest = parameter_digest(self._model)
        return UnloggedIteration(result, mean_step, digest)

    def _log_unlogged(self) -> None:
        """Log the last iteration whose step is settled, if it is not logged yet; a collective call."""
        if self._unlogged is None:
            return
        unlogged, self._unlogged = self._unlogged, None
        result = unlogged.result
        if unlogged.mean_step is not None:
            assert self._zero_bubble is not None
            result = replace(result, idle=self._zero_bubble.measured_idle(unlogged.mean_step))
        if self._progress.iteration % self._args.log_interval == 0:
            result = replace(result, waits=self._session.replicas.take_waits())
        self._log.record(result)
        if warning := self._watch.warning(result.was_rolled_back):
            print_rank_0(warning)
        if self._numerics is not None:
            assert unlogged.parameter_digest is not None
            self._numerics.write(self._progress.iteration, result.lm_loss, result.grad_norm, unlogged.parameter_digest)

    def _gather_parameters(self) -> None:
        """Gather the parameters that arrive only during the next forward with `--overlap-param-gather`."""
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
        """Validate and log the last step if it is pending, before anything but training reads the parameters."""
        self._session.settle()
        self._log_unlogged()

    def _prints_a_line(self) -> bool:
        return self._zero_bubble is not None and self._progress.iteration % self._args.log_interval == 0

    def _prediction(self, num_microbatches: int) -> Prediction | None:
        """The present schedule at measured costs in iterations that print a line, else None."""
        if self._zero_bubble is None or not self._prints_a_line():
            return None
        return self._zero_bubble.prediction(num_microbatches)

    def evaluate(self) -> None:
        """Print the mean loss over `--eval-iters` iterations of validation data."""
        args = self._args
        self._session.replicas.average_all(self._progress.iteration)
        for chunk in self._model:
            chunk.eval()
        num_microbatches = get_num_microbatches()
        reports = []
        with self._between.evaluation(), torch.no_grad():
            for _ in range(args.eval_iters):
                reports += self._forward_backward(
                    data_iterator=self._valid_data, num_microbatches=num_microbatches, forward_only=True
                )
        self._progress.consumed_valid_samples += args.eval_iters * get_current_global_batch_size()
        for chunk in self._model:
            chunk.train()
        if self._finite is not None:
            self._finite.check_losses(losses_of(reports))
        self._log.record_validation(mean_loss(reports, _all_replicas()))

    def _pausing(self, action: Callable[[], None]) -> None:
        self._settle()
        paused_at = self._log.pause()
        action()
        self._log.resume(paused_at)


def _all_replicas() -> dist.ProcessGroup:
    """The ranks that hold the same part of the model, with the parts of their sequences."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
