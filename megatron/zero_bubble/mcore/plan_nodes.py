"""Completes megatron-core's schedule plans so that a plan computes the same results as the model's forward.

A schedule plan of megatron-core calls the parts of a layer and not the layer itself, so that hooks of the layer do not
run. Under sequence parallelism, a schedule plan of megatron-core does not give layers the random state from which each
tensor-parallel rank draws its own dropout. If the last layer is dense, a schedule plan of megatron-core leaves out the
norm after the last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import megatron.core
import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.transformer.transformer_layer import make_viewless_tensor


def complete_plan(model: Any, plan: Any) -> None:
    """Run the model's forward pre-hooks, and change `plan` so that it computes the same results as the model's forward.

    Args:
        model: the model whose `build_schedule_plan` made the plan.
    """
    config = model.config
    run_hooks(model)
    own = len(model.decoder.layers)
    for number in range(plan.num_layers()):
        planned = plan.get_layer(number)
        first = _first_node(planned)
        _wrap(first, partial(_after_hooks, planned.layer))
        if number < own and config.sequence_parallel:
            # Layers of multi-token prediction fork the random state themselves.
            for node in (first, planned.mlp, planned.moe_combine):
                _wrap(node, _forked)
        is_dense = not isinstance(planned.moe_combine, ScheduleNode)
        if number == own - 1 and is_dense and model.decoder.final_layernorm is not None:
            _wrap(planned.mlp, partial(_with_norm, model.decoder.final_layernorm))
        if config.num_moe_experts == config.expert_model_parallel_size or _passes_tokens_on(config):
            # These experts take the tokens as they arrive, without a copy, and need them in their backward.
            # megatron-core frees the tokens after the forward; from 0.18 on, it keeps the tokens of a rank's only
            # expert itself.
            planned.mlp.free_input = False


def _passes_tokens_on(config: Any) -> bool:
    """Whether the dispatcher makes no copy of the tokens for experts in bf16, in a model with some layers in fp8."""
    kind, backend = (
        getattr(config, f"moe_{name}", None) for name in ("token_dispatcher_type", "flex_dispatcher_backend")
    )
    is_flex = kind == "flex" and backend in ("hybridep", "ncclep")
    return is_flex and bool(getattr(config, "first_last_layers_bf16", False))


def _first_node(planned: Any) -> Any:
    """Return the first node of a layer's plan; the node's name is `attn` before megatron-core 0.19."""
    for name in ("attn", "pre_dispatch_computation"):
        if hasattr(planned, name):
            return getattr(planned, name)
    raise ValueError(
        f"--overlap-moe-expert-parallel-comm does not work with the schedule plans of megatron-core "
        f"{megatron.core.__version__} under a zero-bubble schedule: use 0.16 to 0.20"
    )


def run_hooks(module: torch.nn.Module) -> None:
    """Run the forward pre-hooks of a module, with no inputs."""
    for number, hook in module._forward_pre_hooks.items():
        if number in module._forward_pre_hooks_with_kwargs:
            hook(module, (), {})
        else:
            hook(module, ())


def _wrap(node: Any, around: Callable[..., Any]) -> None:
    """Replace a `ScheduleNode`'s forward by `around`, which gets the original forward; skip nodes of other classes."""
    if isinstance(node, ScheduleNode):
        node.forward_func = partial(around, node.forward_func)


def _forked(forward: Callable[..., Any], *inputs: Any) -> Any:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return forward(*inputs)


def _after_hooks(layer: torch.nn.Module, forward: Callable[..., Any], *inputs: Any) -> Any:
    run_hooks(layer)
    return forward(*inputs)


def _with_norm(norm: torch.nn.Module, forward: Callable[..., Any], *inputs: Any) -> Any:
    return make_viewless_tensor(inp=norm(forward(*inputs)), requires_grad=True, keep_graph=True)
