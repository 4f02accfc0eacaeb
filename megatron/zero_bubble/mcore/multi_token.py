"""Reads and resets the losses of multi-token prediction, which megatron-core adds up in a global variable.

With multi-token prediction, the last stage predicts further tokens, each with its own layer and loss. Schedules need
not handle the losses of further tokens, because megatron-core computes these losses inside the model, and adds their
gradients to the last layer's output gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def take_losses(num_microbatches: int, group: dist.ProcessGroup) -> tuple[float, ...]:
    """Return the last iteration's losses of multi-token prediction, and reset their sums; () except on the last stage.

    There is one loss for each further predicted token. Each loss is a mean over the microbatches and over the ranks of
    `group`. If `group` consists of the data-parallel and context-parallel ranks, the losses equal the losses that
    Megatron-LM logs. `take_losses` is a collective call of `group`'s ranks on the last stage.
    """
    tracked = tracked_sums()
    sums = tracked.get("values", tracked.get("loss_values"))  # `loss_values` from megatron-core 0.19 on
    if sums is None:
        return ()
    total = sums / (num_microbatches * group.size())
    dist.all_reduce(total, group=group)
    forget_losses()
    # After a model with multi-token prediction, megatron-core keeps the sums of this model, which stay zero.
    return tuple(total.tolist()) if total.any() else ()


def tracked_sums() -> dict[str, torch.Tensor]:
    """Return a dictionary of megatron-core's sums for multi-token prediction; {} except on the last stage.

    In an iteration, megatron-core sums the losses of multi-token prediction over microbatches. From 0.19 on,
    megatron-core also counts all predictions and the correct predictions.
    """
    tracker = MTPLossLoggingHelper.tracker
    tensors = {name: value for name, value in tracker.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in tensors.items() if not name.startswith("cumulative")}


def track(sums: dict[str, torch.Tensor]) -> None:
    """Store the last stage's sums of multi-token prediction on this rank, so that Megatron-LM logs the averages."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    MTPLossLoggingHelper.tracker.update(**sums, reduce_group=None, avg_group=group)


def forget_losses() -> None:
    """Set the sums of multi-token prediction to zero, before an iteration's forwards run or run again."""
    for sums in tracked_sums().values():
        sums.zero_()
