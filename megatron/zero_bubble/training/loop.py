"""The training loop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.runtime.watchdog import Watchdog
from megatron.zero_bubble.schedules import ForwardBackward
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.checkpoint import Checkpointer
from megatron.zero_bubble.training.data import DataConfig, get_batch
from megatron.zero_bubble.training.initialize import print_rank_0
from megatron.zero_bubble.training.logging import StepResult, TrainingLog
from megatron.zero_bubble.training.numerics import NumericsLog
from megatron.zero_bubble.training.timeline import TimelineWriter

DataIterator = Iterator[dict[str, torch.Tensor]] | None


def loss_func(
    loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of the tokens that count, their number, and both for the log.

    Args:
        loss_mask: [batch, sequence], 1.0 where a token counts.
        output: [batch, sequence], the loss of each token.
    """
    assert loss_mask is not None, "only the last stage computes a loss, and there the data has a mask"
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def make_forward_step(data_config: DataConfig) -> Callable[..., Any]:
    """The forward step as megatron-core's schedules call it."""

    def forward_step(data_iterator: DataIterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = get_batch(
            data_iterator,
            data_config,
            is_first=get_attr_wrapped_model(model, "pre_process"),
            is_last=get_attr_wrapped_model(model, "post_process"),
        )
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
        return output, partial(loss_func, batch.loss_mask)

    return forward_step


def mean_loss(reports: list[dict[str, torch.Tensor]]) -> float | None:
    """Loss per token over all microbatches and replicas; None on a rank without the last stage."""
    if not reports:
        return None
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return (total[0] / total[1]).item()


class Trainer:
    """Runs iterations until the last one, an exit interval, a time limit or a signal.

    Args:
        forward_backward: megatron-core's forward-backward function or our drop-in for it.
        train_data: microbatches, one iterator a model chunk; None for a chunk that needs no data.
        valid_data: the same for evaluation.
    """

    def __init__(
        self,
        args: Arguments,
        model: list[Any],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        forward_backward: Callable[..., list[Any]],
        data_config: DataConfig,
        train_data: list[DataIterator],
        valid_data: list[DataIterator],
        checkpointer: Checkpointer,
        log: TrainingLog,
        timeline: TimelineWriter | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._args = args
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._forward_backward = partial(
            forward_backward,
            forward_step_func=make_forward_step(data_config),
            model=model,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.seq_length,
        )
        self._zero_bubble = forward_backward if isinstance(forward_backward, ForwardBackward) else None
        self._timeline = timeline
        self._watchdog = watchdog
        self._train_data = train_data
        self._valid_data = valid_data
        self._checkpointer = checkpointer
        self._log = log
        self._numerics = NumericsLog(args.log_numerics, args.iteration, args.log_rank) if args.log_numerics else None
        self._started = time.monotonic()
        self._signalled = False
        if args.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def train(self) -> None:
        """Train; save at the end if `--save` was given."""
        args = self._args
        for chunk in self._model:
            chunk.train()
        saved_at = args.iteration
        while args.iteration < args.train_iters:
            update_num_microbatches(args.consumed_train_samples, consistency_check=True)
            self._train_step()
            if args.eval_iters > 0 and args.iteration % args.eval_interval == 0:
                self._pausing(self.evaluate)
            reason = self._exit_reason()
            if args.save and (reason or (args.save_interval and args.iteration % args.save_interval == 0)):
                self._pausing(self._checkpointer.save)
                saved_at = args.iteration
            if reason:
                print_rank_0(f"exiting at iteration {args.iteration}: {reason}")
                return
        if args.save and saved_at != args.iteration:
            self._checkpointer.save()

    def close(self) -> None:
        """Leave nothing open that the process groups carry."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._zero_bubble is not None:
            self._zero_bubble.close()

    def _train_step(self) -> None:
        args = self._args
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        batch_size = get_current_global_batch_size()
        num_microbatches = get_num_microbatches()
        reports = self._forward_backward(
            data_iterator=self._train_data, num_microbatches=num_microbatches, forward_only=False
        )
        was_updated, grad_norm, num_zeros = self._optimizer.step()
        if was_updated:
            self._scheduler.step(increment=batch_size)
        args.iteration += 1
        args.consumed_train_samples += batch_size
        result = StepResult(
            lm_loss=mean_loss(reports),
            grad_norm=grad_norm,
            num_zeros=num_zeros,
            # As Megatron-LM logs it: after the scheduler's step.
            learning_rate=get_canonical_lr_for_logging(self._optimizer.param_groups) or 0.0,
            loss_scale=self._optimizer.get_loss_scale().item(),
            batch_size=batch_size,
            was_skipped=not was_updated,
            **self._bubble_rates(num_microbatches),
        )
        self._log.record(result)
        if self._timeline is not None:
            self._timeline.after_iteration(args.iteration, num_microbatches)
        if self._numerics is not None:
            self._numerics.write(args.iteration, result.lm_loss, result.grad_norm, self._model)

    def _bubble_rates(self, num_microbatches: int) -> dict[str, Any]:
        """For the iterations that print a line: what of the pipeline idled, and what of it should."""
        if self._zero_bubble is None or self._args.iteration % self._args.log_interval != 0:
            return {}
        return {
            "bubble_rate": self._zero_bubble.measured_bubble_rate(),
            "predicted_bubble_rate": self._zero_bubble.predicted_bubble_rate(num_microbatches),
        }

    def evaluate(self) -> None:
        """Mean loss over `--eval-iters` iterations of validation data, printed."""
        args = self._args
        for chunk in self._model:
            chunk.eval()
        num_microbatches = get_num_microbatches()
        reports = []
        with torch.no_grad():
            for _ in range(args.eval_iters):
                reports += self._forward_backward(
                    data_iterator=self._valid_data, num_microbatches=num_microbatches, forward_only=True
                )
        args.consumed_valid_samples += args.eval_iters * get_current_global_batch_size()
        for chunk in self._model:
            chunk.train()
        self._log.record_validation(mean_loss(reports))

    def _pausing(self, action: Callable[[], None]) -> None:
        paused_at = self._log.pause()
        action()
        self._log.resume(paused_at)

    def _exit_reason(self) -> str | None:
        """Why to stop now, if at all: the same answer on every rank."""
        args = self._args
        if args.exit_interval and args.iteration % args.exit_interval == 0:
            return f"--exit-interval {args.exit_interval}"
        if not args.exit_signal_handler and args.exit_duration_in_mins is None:
            return None
        minutes = (time.monotonic() - self._started) / 60.0
        over = args.exit_duration_in_mins is not None and minutes > args.exit_duration_in_mins
        votes = torch.tensor([self._signalled, over], dtype=torch.int, device=torch.cuda.current_device())
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        if votes[0].item():
            return "SIGTERM"
        return f"--exit-duration-in-mins {args.exit_duration_in_mins}" if votes[1].item() else None

    def _on_signal(self, *unused: Any) -> None:
        self._signalled = True
