"""The spec of a hybrid model whose linear layers defer W as those of Transformer Engine do.

    --spec tests.mcore.deferring_spec stack_spec

It is the spec of `hybrid_spec.py` with `DeferringLinear`, which megatron-core builds as it builds `TELinear`: the
configuration's `delay_wgrad_compute` decides whether a layer defers its W. Experts keep megatron-core's own layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron.zero_bubble.mcore import hybrid_spec
from tests.mcore.deferring_layer import DeferringLinear


class SpecLinear(DeferringLinear):
    """A `DeferringLinear` with the constructor of megatron-core's linear layers, on one tensor-parallel rank."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            delay_wgrad_compute=config.delay_wgrad_compute,
            fuse_wgrad_accumulation=False,
            bias_gradient=("from the caller" if skip_bias_add else "in W") if bias else None,
        )
        self.config = config
        init_method(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def backward_dw(self) -> None:
        """Compute W as `TELinear` does: the configuration has to have the setting at this time, too."""
        if self.config.delay_wgrad_compute:
            super().backward_dw()


def _stack_spec() -> Any:
    spec = copy.deepcopy(hybrid_spec.stack_spec)
    attention = spec.submodules.attention_layer.submodules.self_attention.submodules
    attention.linear_qkv = attention.linear_proj = SpecLinear
    mlp = spec.submodules.mlp_layer.submodules.mlp
    # From megatron-core 0.19 on it is a partial function and not a spec.
    linear = mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
    linear.linear_fc1 = linear.linear_fc2 = SpecLinear
    if hasattr(spec.submodules.mamba_layer, "submodules"):
        mixer = spec.submodules.mamba_layer.submodules.mixer.submodules
        mixer.in_proj = mixer.out_proj = SpecLinear
    return spec


stack_spec = _stack_spec()
