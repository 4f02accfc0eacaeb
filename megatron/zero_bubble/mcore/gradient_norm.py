"""The global norm of the gradients, computed as megatron-core does, so that it is bitwise the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, clip_grads

from megatron.zero_bubble.mcore.optimizer import parts

Norm = float | torch.Tensor


def norm_groups(optimizer: MegatronOptimizer) -> list[tuple[list[MegatronOptimizer], dist.ProcessGroup]]:
    """Return, for each norm that megatron-core computes, the optimizers in it and the group it is reduced over."""
    if isinstance(optimizer, ChainedOptimizer) and optimizer.grads_states_parallel_group_is_shared():
        return [(parts(optimizer), optimizer.get_grad_stats_parallel_group())]
    return [([part], part.get_grad_stats_parallel_group()) for part in parts(optimizer)]


def gradients_of_norm(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Return this rank's gradients that megatron-core includes in the global norm."""
    # megatron-core has the first name up to 0.18 and the second from 0.19 on.
    names = ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm")
    gradients = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    return gradients()


def squared_norm(optimizers: Sequence[MegatronOptimizer]) -> torch.Tensor:
    """Return this rank's term of the squared global norm; one element, fp32."""
    gradients = [gradient for optimizer in optimizers for gradient in gradients_of_norm(optimizer)]
    device = torch.cuda.current_device()
    if not gradients:
        return torch.zeros(1, dtype=torch.float, device=device)
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
    return norm**2.0


def norm_of_all(squared_norms: Sequence[torch.Tensor]) -> Norm:
    """Return the norm of all gradients from the reduced squared norm of each of `norm_groups`."""
    norms = [_root(each) for each in squared_norms]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


def _root(squared_norm: torch.Tensor) -> Norm:
    """Return the square root.

    megatron-core from 0.17 on keeps the norm as a tensor if Transformer Engine has a kernel that scales by a tensor.
    """
    if getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is not None:
        return squared_norm.pow(0.5)
    return squared_norm.item() ** 0.5
