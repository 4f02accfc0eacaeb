"""Builds and runs models of megatron-core on torch's meta device, as one rank of a job of any size.

On the meta device, tensors have shapes and no data, and collectives do nothing, so that one process can count the
memory and the work of one rank of a large job.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_softmax
from megatron.core.models import backends
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch.fx.experimental import _config as symbolic_shapes
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.zero_bubble.mcore import layer_spec
from megatron.zero_bubble.mcore.counted_layers import MergedExperts, rotated
from megatron.zero_bubble.mcore.cpu import ENVIRONMENT, FACTORIES, CpuSubstitution, Substitution, substitutions
from megatron.zero_bubble.mcore.cpu_kernels import GatedRMSNorm, delta_net_kernels
from megatron.zero_bubble.mcore.decoder_models import STACK_MODULE


@contextlib.contextmanager
def on_meta_device(*, tensor: int, context: int, expert: int, expert_tensor: int) -> Iterator[None]:
    """Let models be built and run on the meta device inside the `with` block, as on rank 0 of a job without a pipeline.

    The process must not have a default process group yet; torch's fake process group stands in for the job's ranks.

    Args:
        tensor: number of tensor-parallel ranks.
        context: number of context-parallel ranks.
        expert: number of expert-parallel ranks.
        expert_tensor: number of tensor-parallel ranks of an expert.
    """
    assert not dist.is_initialized(), "a default process group exists already"
    shapes, size = cast("Any", symbolic_shapes), math.lcm(tensor * context, expert_tensor * expert)
    with contextlib.ExitStack() as changes:
        changes.callback(torch.set_rng_state, torch.get_rng_state())
        changes.callback(setattr, sys, "excepthook", sys.excepthook)  # `init_process_group` replaces the hook
        # Nothing may run on a CUDA device of this machine.
        changes.callback(CpuSubstitution(ENVIRONMENT, substitutions()).restore)
        changes.callback(CpuSubstitution({}, _substitutions()).restore)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        changes.callback(dist.destroy_process_group)
        changes.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        with (
            torch.compiler.set_stance("force_eager"),
            # Give `nonzero` of a mask a shape, although a mask on the meta device has no values; the counts need no
            # values.
            shapes.patch(meta_nonzero_assume_all_nonzero=True),
        ):
            yield


def _substitutions() -> Iterator[Substitution]:
    reason = "tensors must have no data"
    for name in {*FACTORIES} - {"triu", "tensor"}:  # `triu` takes a tensor; values of `tensor` are read
        yield Substitution(torch, name, _without_data(getattr(torch, name)), reason)
    yield Substitution(torch.cuda, "is_available", lambda: False, reason)
    yield Substitution(torch.cuda, "current_device", lambda: "meta", reason)
    reason = "on a GPU dropout is one kernel, which keeps a byte for each element"
    yield Substitution(torch.nn.functional, "dropout", _dropout, reason)
    reason = "on a GPU the rotary embedding is one kernel, which keeps no tensors"
    for module in (attention, multi_latent_attention):
        yield Substitution(module, "apply_rotary_pos_emb", rotated, reason)
    reason = "all layers and microbatches share one causal mask, which is therefore a parameter here"
    yield Substitution(fused_softmax, "get_default_causal_mask", _mask, reason)
    reason = "the first backward creates this scale on its own device"
    yield Substitution(MoEAuxLossAutoScaler, "main_loss_backward_scale", None, reason)
    reason = "an earlier schedule of this process has left a scale on the device of its losses"
    yield Substitution(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0), reason)
    reason = "a rank may have thousands of equal experts, which are counted as one module"
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    # From 0.17 on, megatron-core calls the result; before, it unpacks a pair.
    is_called = hasattr(backends, "ExpertsBuilder")
    experts = partial(MergedExperts, submodules=parts) if is_called else (MergedExperts, parts)
    yield Substitution(backends.LocalSpecProvider, "grouped_mlp_modules", lambda *_: experts, reason)
    if find_spec("transformer_engine"):
        reason = "megatron-core gives a stack of local layers a norm of Transformer Engine, which needs a GPU"
        yield Substitution(layer_spec, "LayerNormImpl", layer_spec.LocalNorm, reason)
        yield Substitution(importlib.import_module(STACK_MODULE), "TENorm", layer_spec.LocalNorm, reason)
    yield Substitution(mamba_mixer, "HAVE_MAMBA_SSM", True, "Mamba's kernels are counted and do not run")
    yield Substitution(mamba_mixer, "ExtendedRMSNorm", GatedRMSNorm, "the gated norm is one kernel, which does not run")
    for replacement in delta_net_kernels(gated_delta_net, lambda *_: None):
        yield Substitution(*replacement, "kernels of `fla` need data")
    if not hasattr(random, "FP8GlobalStateManager"):
        reason = "megatron-core's recomputation uses this name even without fp8, but only Transformer Engine defines it"
        without_fp8 = SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
        yield Substitution(random, "FP8GlobalStateManager", without_fp8, reason)
        for name in ("fp8_autocast", "activation_recompute_forward"):
            yield Substitution(random, name, lambda **_: contextlib.nullcontext(), reason)


def _without_data(factory: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: factory(*args, **{**kwargs, "device": "meta"})


def _mask(length: int) -> torch.Tensor:
    return torch.nn.Parameter(torch.empty(length, length, dtype=torch.bool), requires_grad=False)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input
