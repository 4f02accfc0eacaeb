"""The activation of a model's MLPs, as the flags name it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.trainer.arguments import Arguments

_ACTIVATIONS: dict[str, tuple[Any, bool]] = {
    "swiglu": (torch.nn.functional.silu, True),
    "quick_geglu": (quick_gelu, True),
    "squared_relu": (squared_relu, False),
}
"""Name of a flag -> (activation function, whether the MLP is gated). Without any of the flags, an MLP computes GeLU."""


def check_activation(args: Arguments) -> None:
    """Raise `ValueError` if the flags name several activations."""
    given = [flag_name(name) for name in _ACTIVATIONS if getattr(args, name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: an MLP has one activation, give one of them")


def activation_fields(args: Arguments) -> dict[str, Any]:
    """Return the values of the fields of megatron-core's configuration that set the activation."""
    for name, (function, is_gated) in _ACTIVATIONS.items():
        if getattr(args, name):
            if not torch.cuda.is_available() and not fuses_activation(args):
                # megatron-core gives some functions to torch.compile, which saves no time on a CPU.
                function = getattr(function, "_torchdynamo_orig_callable", function)
            return {"activation_func": function, "gated_linear_unit": is_gated}
    return {}


def fuses_activation(args: Arguments) -> bool:
    """Return whether one fused kernel adds an MLP's bias and computes the activation; False for local layers.

    megatron-core fuses GeLU only outside of experts, quick GeLU only in routed experts, and squared ReLU nowhere; the
    setting holds for all MLPs of a model.
    """
    if args.transformer_impl == "local" or args.squared_relu:
        return False
    if args.swiglu:
        return not args.no_bias_swiglu_fusion
    if args.quick_geglu:
        has_others = args.moe_layer_freq != 1 or args.moe_shared_expert_intermediate_size or args.hybrid_layer_pattern
        has_kernel = bool(args.num_experts) and not has_others
    else:
        has_kernel = not args.num_experts
    return has_kernel and not (args.no_bias_gelu_fusion or args.disable_bias_linear)
