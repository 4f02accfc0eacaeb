"""Prints log lines that begin with Megatron-LM's fields, and end with fields about the zero-bubble schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.timers import Timers

from megatron.zero_bubble.mcore.post_validation import StepOutcome
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.runtime.recorder import PipelineTime, StepTime
from megatron.zero_bubble.runtime.replica_waits import Waits
from megatron.zero_bubble.runtime.step_planner import OrderTimes
from megatron.zero_bubble.session.reports import idle_fields, order_fields, print_line, wait_fields
from megatron.zero_bubble.session.run_summary import RunSummary
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint import Progress

_TIMERS = [
    *("forward-backward", "forward-compute", "backward-compute", "all-grads-sync", "params-all-gather"),
    *("conditional-embedder-grads-all-reduce", "non-tensor-parallel-grads-all-reduce", "embedding-grads-all-reduce"),
    *("optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad"),
    *("optimizer-count-zeros", "optimizer-inner-step", "optimizer-copy-main-to-model-params"),
]
"""Names of megatron-core's timers, the same on all ranks; a rank may lack some of the timers."""
_UNKNOWN = StepOutcome(was_updated=True, grad_norm=None)


@dataclass(frozen=True)
class StepResult:
    """The results of one iteration. The losses are None or empty on ranks without the last stage.

    With post-validation, the losses, the batch size and the predicted time of the schedule are known before the outcome
    of the optimizer step.
    """

    lm_loss: float | None
    batch_size: int
    """Number of sequences in the iteration."""
    outcome: StepOutcome = _UNKNOWN
    """Outcome of the optimizer step; the gradient norm is None if the step is skipped, or in fp32 without clipping."""
    learning_rate: float = 0.0
    loss_scale: float = 1.0
    measured: PipelineTime | None = None
    """Mean pipeline time of the steps since the last log line; None in iterations without a log line, and under
    megatron-core's own schedule."""
    prediction: Prediction | None = None
    """Predicted time and idle time of the schedule; None without measured costs or without a log line."""
    further_losses: tuple[float, ...] = ()
    """Losses of multi-token prediction, on ranks with `lm_loss`; empty without multi-token prediction."""
    is_local: bool = False
    """Whether the replica took this step alone; the losses and the gradient norm then come from this replica only."""
    waits: Waits | None = None
    """Waiting times of the replicas since the last log line; None without a log line or with one replica."""
    orders: OrderTimes | None = None
    """Times and counts of steps with planned orders of microbatches, summed over the steps since the last log line."""
    mean_step: StepTime | None = None
    """Mean times of this rank in the steps since the last log line; None if `measured` is None."""
    parameter_digest: str | None = None
    """Digest of this rank's parameters; None without `--log-numerics`."""
    finished_at: float | None = None
    """Time at which the step was complete, in seconds of `time.perf_counter`; None stands for the time of logging."""


class TrainingLog:
    """Collects the results of iterations, and prints one log line every `--log-interval` iterations.

    Args:
        log_rank: global rank that has the loss and prints the log lines.
        timers: megatron-core's timers, whose times follow each log line; None without `--timing-log-level`.
    """

    def __init__(self, args: Arguments, progress: Progress, log_rank: int, timers: Timers | None = None) -> None:
        self._args = args
        self.progress = progress
        self._log_rank = log_rank
        self._timers = timers
        self._summary = RunSummary()
        self._results: list[StepResult] = []
        """The results of the iterations since the last log line."""
        self._start = _now()

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the time of the `with` block, such as an evaluation, from the logged time of iterations."""
        paused_at = _now()
        yield
        self._start += _now() - paused_at

    def record(self, result: StepResult) -> None:
        """Record one iteration, and print the log lines that are due after the iteration."""
        args = self._args
        self._results.append(result)
        if self.progress.iteration % args.log_interval == 0:
            finished_at = _now() if result.finished_at is None else result.finished_at
            self._print(result, (finished_at - self._start) / len(self._results))
            self._results, self._start = [], finished_at
        if args.log_memory_interval is not None and self.progress.iteration % args.log_memory_interval == 0:
            _print_memory(self.progress.iteration)

    def _say(self, text: str) -> None:
        """Print `text` on the rank that has the loss."""
        if dist.get_rank() == self._log_rank:
            print_line(text)

    def _print(self, result: StepResult, seconds: float) -> None:
        """Print a log line about the iterations since the previous line; `seconds` is the mean time of an iteration."""
        args, outcomes = self._args, [each.outcome for each in self._results]
        grad_norm, num_zeros = result.outcome.grad_norm, result.outcome.num_zeros
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        line = f" [{stamp}] iteration {self.progress.iteration:8d}/{args.train_iters:8d} |"
        line += f" consumed samples: {self.progress.consumed_train_samples:12d} |"
        line += f" elapsed time per iteration (ms): {seconds * 1000.0:.1f} |"
        line += f" learning rate: {result.learning_rate:.6E} |"
        line += f" global batch size: {result.batch_size:5d} |"
        for number, loss in enumerate(self._mean_losses(result)):
            line += f" {f'mtp_{number}' if number else 'lm'} loss: {loss:.6E} |"
        line += f" loss scale: {result.loss_scale:.1f} |"
        if grad_norm is not None:
            # From 0.17 on, with new kernels of Transformer Engine, the norm is a tensor on the device.
            line += f" grad norm: {float(grad_norm):.3f} |"
        if args.log_num_zeros_in_grad and num_zeros is not None:
            line += f" num zeros: {num_zeros} |"
        line += f" number of skipped iterations: {sum(not outcome.was_updated for outcome in outcomes):3d} |"
        nans = sum(each.lm_loss is not None and not math.isfinite(each.lm_loss) for each in self._results)
        line += f" number of nan iterations: {nans:3d} |"
        measured, prediction = result.measured, result.prediction
        line += idle_fields(measured.idle if measured else None, prediction.idle if prediction else None)
        line += order_fields(result.orders)
        line += wait_fields(result.waits)
        if rollbacks := sum(outcome.was_amended for outcome in outcomes):
            redone = sum(outcome.num_redone_forwards for outcome in outcomes)
            line += f" rollbacks: {rollbacks} | redone forwards: {redone} |"
        if waited := sum(outcome.has_waited for outcome in outcomes):
            line += f" steps that waited: {waited} |"
        self._say(line)
        if self._timers is not None:
            times = self._timers.get_all_timers_string(_TIMERS, normalizer=len(self._results))
            if times is not None:
                self._say(times)
        self._summary.record(self.progress.iteration, seconds * 1e3, measured, prediction)

    def _mean_losses(self, result: StepResult) -> list[float]:
        """Return the mean losses since the last log line: the loss of the model, then losses of multi-token prediction.

        If replicas take optimizer steps independently, `_mean_losses` is a collective call of the ranks that have the
        losses.
        """
        finite = [
            (each.lm_loss, *each.further_losses)
            for each in self._results
            if each.lm_loss is not None and math.isfinite(each.lm_loss) and each.outcome.was_updated
        ]
        sums = [sum(losses) for losses in zip(*finite, strict=True)]
        if not result.is_local or result.lm_loss is None:
            return [total / len(finite) for total in sums]
        sums = sums or [0.0] * (1 + len(result.further_losses))
        totals = torch.tensor([*sums, len(finite)], dtype=torch.float64, device=torch.cuda.current_device())
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        *sums, count = totals.tolist()
        return [total / count for total in sums] if count else []

    def print_summary(self) -> None:
        """Print the summary of the iterations since the last plan, if there is a summary."""
        if self._summary.line is not None:
            self._say(self._summary.line)

    def record_validation(self, lm_loss: float | None) -> None:
        """Print the validation loss in Megatron-LM's format; print nothing if `lm_loss` is None."""
        if lm_loss is None:
            return
        perplexity = math.exp(min(20.0, lm_loss)) if math.isfinite(lm_loss) else lm_loss
        line = f" validation loss at iteration {self.progress.iteration} | lm loss value: {lm_loss:.6E} |"
        line += f" lm loss PPL: {perplexity:.6E} | "
        rule = "-" * (len(line) + 1)
        self._say(f"{rule}\n{line}\n{rule}")


def _print_memory(iteration: int) -> None:
    """Print a line about this rank's CUDA memory in MiB, in Megatron-LM's format; print nothing without CUDA."""
    if not torch.cuda.is_available():
        return
    figures = {
        "allocated": torch.cuda.memory_allocated(),
        "max allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max reserved": torch.cuda.max_memory_reserved(),
    }
    words = " | ".join(f"{name}: {value / 2**20:.2f}" for name, value in figures.items())
    print_line(f"[Rank {dist.get_rank()}] (after {iteration} iterations) memory (MB) | {words}")


def _now() -> float:
    """Wait until the GPU, if there is one, has finished all launched work, and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
