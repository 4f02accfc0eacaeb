"""Reads and resets the losses of multi-token prediction, which megatron-core adds up in a global of the process.

The last stage predicts further tokens, each by a layer and a loss of its own. megatron-core computes these losses
inside the model and adds their gradients to that of the last layer's output, so schedules need not handle them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def take_losses(num_microbatches: int) -> tuple[float, ...]:
    """Return the last iteration's losses of multi-token prediction, and reset them; on other stages, nothing.

    Each loss belongs to one token ahead and is a mean over microbatches and replicas, as Megatron-LM logs it. A
    collective call of the replicas of the last stage.
    """
    sums = MTPLossLoggingHelper.tracker.get("values")
    if sums is None or not sums.any():
        return ()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    total = sums / (num_microbatches * group.size())
    dist.all_reduce(total, group=group)
    forget_losses()
    return tuple(total.tolist())


def forget_losses() -> None:
    """Set the summed losses to zero; called, too, when the forwards of an iteration run again."""
    sums: torch.Tensor | None = MTPLossLoggingHelper.tracker.get("values")
    if sums is not None:
        sums.zero_()
