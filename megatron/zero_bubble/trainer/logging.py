"""Prints the log lines of a training: Megatron-LM's fields in Megatron-LM's format, then fields of zero bubble."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.runtime.recorder import PipelineTime
from megatron.zero_bubble.runtime.replica_waits import Waits
from megatron.zero_bubble.runtime.step_planner import OrderTimes
from megatron.zero_bubble.session.reports import idle_fields, order_fields, print_line, wait_fields
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint import Progress
from megatron.zero_bubble.trainer.records import RunSummary


@dataclass(frozen=True)
class StepResult:
    """The results of one iteration. The losses are None or empty on ranks without the last stage.

    With post-validation, the losses, the batch size and the predicted time of the schedule are known before the norm
    and the other results of the optimizer step.
    """

    lm_loss: float | None
    batch_size: int
    """Number of sequences in the iteration."""
    grad_norm: float | None = None
    """Norm of all gradients; None if the iteration is skipped, and in fp32 without clipping."""
    num_zeros: float | None = None
    learning_rate: float = 0.0
    loss_scale: float = 1.0
    measured: PipelineTime | None = None
    """Mean pipeline time of the steps since the last log line; None in iterations without a log line, and under
    megatron-core's own schedule."""
    prediction: Prediction | None = None
    """Predicted time and idle time of the schedule, given the measured costs; None in iterations without a log line."""
    was_rolled_back: bool = False
    """Whether post-validation amended the iteration's optimizer step."""
    num_redone_forwards: int = 0
    """Number of forwards, on all ranks of a pipeline, that ran again because the optimizer step was amended."""
    has_waited: bool = False
    """Whether the optimizer step was taken only after validation, because recent steps were amended (clipped or
    skipped)."""
    further_losses: tuple[float, ...] = ()
    """Losses of multi-token prediction, on ranks with `lm_loss`; empty without multi-token prediction."""
    was_skipped: bool = False
    """Whether the optimizer left the parameters unchanged, because a gradient was not finite."""
    is_local: bool = False
    """Whether the replica took this step alone; the losses and the norm then come from this replica only."""
    waits: Waits | None = None
    """How long replicas waited for each other since the last log line; None without a log line or with one replica."""
    orders: OrderTimes | None = None
    """Times and counts of steps with planned orders of microbatches, summed over the steps since the last log line."""
    finished_at: float | None = None
    """Time at which the step was complete, in seconds of `time.perf_counter`; None stands for the time of logging."""


class TrainingLog:
    """Collects the results of iterations and prints one line every `--log-interval` iterations.

    Args:
        log_rank: global rank that has the loss and prints the log lines.
    """

    def __init__(self, args: Arguments, progress: Progress, log_rank: int) -> None:
        self._args = args
        self.progress = progress
        self._log_rank = log_rank
        self._summary = RunSummary()
        self._reset(_now())

    def _reset(self, start: float) -> None:
        self._all_losses: list[tuple[float, ...]] = []
        """Losses of each iteration since the last log line, without skipped iterations and non-finite losses."""
        self._iterations = 0
        self._skipped = 0
        self._nans = 0
        self._rollbacks = 0
        self._redone = 0
        self._waited = 0
        self._start = start

    def pause(self) -> float:
        """Return the current time; the loop calls `pause` before work, such as an evaluation, that is not timed."""
        return _now()

    def resume(self, paused_at: float) -> None:
        """Exclude the time since `paused_at`, a result of `pause`, from the logged time of iterations."""
        self._start += _now() - paused_at

    def record(self, result: StepResult) -> None:
        """Record one iteration, and print the log lines that are due after the iteration."""
        args = self._args
        self._iterations += 1
        self._skipped += result.was_skipped
        self._rollbacks += result.was_rolled_back
        self._redone += result.num_redone_forwards
        self._waited += result.has_waited
        if result.lm_loss is not None:
            is_nan = not math.isfinite(result.lm_loss)
            self._nans += is_nan
            if not is_nan and not result.was_skipped:
                self._all_losses.append((result.lm_loss, *result.further_losses))
        if self.progress.iteration % args.log_interval == 0:
            finished_at = _now() if result.finished_at is None else result.finished_at
            self._print(result, (finished_at - self._start) / self._iterations)
            self._reset(finished_at)
        if args.log_memory_interval is not None and self.progress.iteration % args.log_memory_interval == 0:
            for line in memory_lines(self.progress.iteration):
                print_line(line)

    def _say(self, text: str) -> None:
        """Print `text` on the rank with the loss: the last pipeline rank, unless stages are placed in a V."""
        if dist.get_rank() == self._log_rank:
            print_line(text)

    def _print(self, result: StepResult, seconds: float) -> None:
        """Print a log line about the iterations since the previous line; `seconds` is the mean time of an iteration."""
        args = self._args
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        line = f" [{stamp}] iteration {self.progress.iteration:8d}/{args.train_iters:8d} |"
        line += f" consumed samples: {self.progress.consumed_train_samples:12d} |"
        line += f" elapsed time per iteration (ms): {seconds * 1000.0:.1f} |"
        line += f" learning rate: {result.learning_rate:.6E} |"
        line += f" global batch size: {result.batch_size:5d} |"
        for number, loss in enumerate(self._mean_losses(result)):
            line += f" {f'mtp_{number}' if number else 'lm'} loss: {loss:.6E} |"
        line += f" loss scale: {result.loss_scale:.1f} |"
        if result.grad_norm is not None:
            line += f" grad norm: {result.grad_norm:.3f} |"
        if args.log_num_zeros_in_grad and result.num_zeros is not None:
            line += f" num zeros: {result.num_zeros} |"
        line += f" number of skipped iterations: {self._skipped:3d} |"
        line += f" number of nan iterations: {self._nans:3d} |"
        measured, prediction = result.measured, result.prediction
        line += idle_fields(measured.idle if measured else None, prediction.idle if prediction else None)
        line += order_fields(result.orders)
        line += wait_fields(result.waits)
        if self._rollbacks:
            line += f" rollbacks: {self._rollbacks} | redone forwards: {self._redone} |"
        if self._waited:
            line += f" steps that waited: {self._waited} |"
        self._say(line)
        self._summary.record(self.progress.iteration, self._iterations, seconds * 1e3, measured, prediction)

    def _mean_losses(self, result: StepResult) -> list[float]:
        """Return the mean losses since the last log line: the loss of the model, then losses of multi-token prediction.

        If replicas take optimizer steps without each other, `_mean_losses` is a collective call: in each replica, the
        rank with the loss takes part.
        """
        sums = [sum(losses) for losses in zip(*self._all_losses, strict=True)]
        if not result.is_local or result.lm_loss is None:
            return [total / len(self._all_losses) for total in sums]
        sums = sums or [0.0] * (1 + len(result.further_losses))
        totals = torch.tensor([*sums, len(self._all_losses)], dtype=torch.float64, device=torch.cuda.current_device())
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        *sums, count = totals.tolist()
        return [total / count for total in sums] if count else []

    def print_summary(self) -> None:
        """Print the summary of the iterations since the last plan, if there is a summary."""
        if self._summary.line is not None:
            self._say(self._summary.line)

    def record_validation(self, lm_loss: float | None) -> None:
        """Print the validation loss in Megatron-LM's format, for which users search; print nothing for None."""
        if lm_loss is None:
            return
        perplexity = math.exp(min(20.0, lm_loss)) if math.isfinite(lm_loss) else lm_loss
        line = f" validation loss at iteration {self.progress.iteration} | lm loss value: {lm_loss:.6E} |"
        line += f" lm loss PPL: {perplexity:.6E} | "
        rule = "-" * (len(line) + 1)
        self._say(f"{rule}\n{line}\n{rule}")


def memory_lines(iteration: int) -> list[str]:
    """Return a list with a line about this rank's CUDA memory in MiB, in Megatron-LM's format; [] without CUDA."""
    if not torch.cuda.is_available():
        return []
    figures = {
        "allocated": torch.cuda.memory_allocated(),
        "max allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max reserved": torch.cuda.max_memory_reserved(),
    }
    words = " | ".join(f"{name}: {value / 2**20:.2f}" for name, value in figures.items())
    return [f"[Rank {dist.get_rank()}] (after {iteration} iterations) memory (MB) | {words}"]


def _now() -> float:
    """Return the time in seconds; with a GPU, the time at which the GPU has finished all launched work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
