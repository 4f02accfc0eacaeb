"""The losses of multi-token prediction, which megatron-core adds up in one place of the process.

Further tokens are predicted on the last stage, each by a layer and a loss of its own. megatron-core computes these
losses within the model and adds their gradients to that of the last layer's output: no schedule has to know.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def take_losses(num_microbatches: int) -> tuple[float, ...]:
    """Return the further losses of the iteration that has just run, one a token ahead, on the last stage only.

    Each is a mean over microbatches and replicas, as Megatron-LM logs it.
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
    """Set the sums to zero, because the forwards of this iteration run again."""
    sums: torch.Tensor | None = MTPLossLoggingHelper.tracker.get("values")
    if sums is not None:
        sums.zero_()
