"""Replaces layers on the meta device, so that the counted memory and arithmetic operations match a GPU's kernels.

For layers that this module does not replace, the memory and operations of megatron-core's own code are counted. For a
job with Transformer Engine, the memory and operations of megatron-core's local layers are counted, because the layers
of Transformer Engine 2.x keep the same tensors as the local layers (see `pytorch/module/` in Transformer Engine). The
exception is sequence parallelism (see `gathered_features`). `LayerNormLinear`, which is Transformer Engine's norm fused
with a linear layer, saves the input and the output of the norm, and a statistic for each token (`layernorm_linear.py`).
Transformer Engine's linear layer saves its input (`linear.py`). Fused attention saves queries, keys, values, the
attention's output and the logarithm of the softmax's sums (`attention/dot_product_attention/`). Unfused attention saves
the scores, before and after dropout, and dropout's mask. The counted memory leaves out norm statistics.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.utils.flop_counter import conv_backward_flop, register_flop_formula

from megatron.zero_bubble.mcore.attention import ContextParallelAttention
from megatron.zero_bubble.mcore.cpu_kernels import GatedRMSNorm


class AttentionKernel(Enum):
    """An implementation of attention, which determines the memory and the matrix products of attention."""

    LOCAL = "megatron-core's own attention, which keeps the scores, and the softmax's output in fp32"
    TORCH = "a fused kernel of torch's scaled_dot_product_attention"
    TORCH_MATH = "torch's scaled_dot_product_attention where no fused kernel fits, which keeps the scores in fp32"
    TE_UNFUSED = "Transformer Engine's unfused attention, which keeps the scores"
    TE_FLASH = "flash-attn in Transformer Engine"
    TE_FUSED = "cuDNN's fused attention in Transformer Engine"

    @property
    def keeps_scores(self) -> bool:
        return self in (AttentionKernel.LOCAL, AttentionKernel.TORCH_MATH, AttentionKernel.TE_UNFUSED)

    @property
    def is_transformer_engine(self) -> bool:
        return self in (AttentionKernel.TE_UNFUSED, AttentionKernel.TE_FLASH, AttentionKernel.TE_FUSED)


def count_as_kernels(model: torch.nn.Module, kernel: AttentionKernel) -> None:
    """Replace modules of a model, so that the counted memory and arithmetic operations match a GPU's kernels.

    In the changed model, autograd saves the same tensors, and torch's FLOP counter counts the same operations, as with
    a GPU's kernels. The model keeps megatron-core's own linear projections. If `kernel` belongs to Transformer Engine,
    every tensor-parallel rank gets a whole copy of latent attention's down projections, as in Transformer Engine.
    """
    for module in list(model.modules()):
        if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm, GatedRMSNorm)):
            vars(module)["forward"] = partial(_norm, module)
        elif isinstance(module, Attention):
            if kernel not in (AttentionKernel.LOCAL, AttentionKernel.TORCH_MATH):
                module.core_attention = CountedAttention(module.core_attention, kernel)
            if kernel.is_transformer_engine:
                _duplicate(module)
        elif isinstance(module, MambaMixer):
            vars(module)["_ssm_training"] = partial(_scan, module)
        elif isinstance(module, GatedDeltaNet):
            module.gated_delta_rule = _delta_rule
        elif isinstance(module, MoELayer):
            module.token_dispatcher = EvenDispatcher(module.config.moe_router_topk)


def gathered_features(model: torch.nn.Module) -> int:
    """Count the features of all inputs that Transformer Engine's linear layers gather under sequence parallelism.

    From B to W, Transformer Engine keeps such an input with the tokens of all tensor-parallel ranks. Local layers keep
    the tokens of their rank, and gather the input again in W. The output layer is always a local layer.
    """
    linears = (module for module in model.modules() if isinstance(module, ColumnParallelLinear))
    return sum(
        linear.weight.shape[1]
        for linear in linears
        if linear.sequence_parallel
        and not linear.explicit_expert_comm
        and linear is not getattr(model, "output_layer", None)
    )


def expert_parameters(model: torch.nn.Module) -> dict[int, int]:
    """Map the id of each parameter of a `MergedExperts` module to the number of experts that the module merges."""
    experts = [module for module in model.modules() if isinstance(module, MergedExperts)]
    return {id(parameter): expert.num_merged for expert in experts for parameter in expert.parameters()}


class MergedExperts(SequentialMLP):
    """Merges all experts of a rank into a single expert, which gets the tokens of all experts of the rank."""

    def __init__(self, num_local_experts: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(1, *args, **kwargs)
        self.num_merged = num_local_experts
        is_selective = self.config.recompute_granularity == "selective"
        self._drops_activation = is_selective and "moe_act" in (self.config.recompute_modules or ())

    def forward(self, hidden: torch.Tensor, tokens: Any, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not self._drops_activation:
            output, _ = super().forward(hidden, tokens, probs)
            return output, None
        mlp, checkpoint = self.local_experts[0], CheckpointWithoutOutput()
        inside, _ = mlp.linear_fc1(hidden)
        width = mlp.linear_fc2.weight.shape[1]
        activated = checkpoint.checkpoint(
            lambda inside, probs: _kernel((len(inside), width), inside, probs, kept=(inside, probs)), inside, probs
        )
        output, _ = mlp.linear_fc2(activated)
        checkpoint.discard_output_and_register_recompute(output)
        return output, None


class EvenDispatcher:
    """Dispatches the same number of tokens to the experts of every rank, and keeps no tensors."""

    def __init__(self, experts_of_a_token: int) -> None:
        self._copies = experts_of_a_token * parallel_state.get_expert_tensor_parallel_world_size()

    def dispatch_preprocess(self, hidden: torch.Tensor, _: Any, probs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self._shape = hidden.shape
        return hidden.flatten(0, -2), probs

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Return no buffers, as megatron-core's dispatchers do by default (from 0.19 on)."""
        return None, None

    def token_dispatch(self, hidden: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        rows = len(hidden) * self._copies
        return _kernel((rows, hidden.shape[1]), hidden), _kernel((rows,), probs)

    def dispatch_postprocess(self, hidden: torch.Tensor, probs: torch.Tensor) -> tuple[Any, None, Any]:
        return hidden, None, probs

    def combine_preprocess(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def token_combine(self, output: torch.Tensor) -> torch.Tensor:
        return _kernel((len(output) // self._copies, output.shape[1]), output)

    def combine_postprocess(self, output: torch.Tensor) -> torch.Tensor:
        return output.view(self._shape)


def rotated(t: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Replacement of `apply_rotary_pos_emb`; its operator keeps no tensors for the backward."""
    return _kernel(t.shape, t)


class CountedAttention(torch.nn.Module):
    """Core attention that keeps the same tensors as the attention kernel `kernel`, and counts the kernel's operations.

    A fused kernel skips the pairs of query and key that a causal mask forbids, unless the kernel gets the mask as a
    tensor. The backward of a fused kernel repeats the first matrix product of the forward.

    Args:
        local_attention: the layer's local attention, which the `CountedAttention` replaces.
        kernel: the attention kernel whose memory and operations are counted.
    """

    def __init__(self, local_attention: Any, kernel: AttentionKernel) -> None:
        super().__init__()
        self._kernel, self._dropout = kernel, local_attention.attention_dropout.p
        self._ranks = (
            dist.get_world_size(local_attention._group) if isinstance(local_attention, ContextParallelAttention) else 1
        )
        self._window = local_attention.scale_mask_softmax.window_size

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return a tensor of the shape [sequence, batch, heads * value channels].

        `query`, `key` and `value` have the shape [sequence, batch, heads, channels].
        """
        kernel, ranks = self._kernel, self._ranks
        (tokens, batch, heads, channels), of_value = query.shape, value.shape[-1]
        output, length = (tokens, batch, heads * of_value), tokens * ranks
        is_masked = not kernel.is_transformer_engine and (mask is not None or ranks > 1)
        if kernel.is_transformer_engine:
            query, key, value = (x.contiguous() for x in (query, key, value))
        kept = [query, key, value]
        if kernel is AttentionKernel.TORCH and ranks > 1:  # keys and values of all context-parallel ranks
            kept[1:] = [x.new_empty(x.shape[0] * ranks, *x.shape[1:]) for x in (key, value)]
        if kernel is AttentionKernel.TE_UNFUSED:
            if key.shape[2] != heads:  # keys and values are repeated for every head
                kept[1:] = [x.new_empty(*x.shape[:2], heads, x.shape[3]) for x in (key, value)]
            scores = (batch, heads, tokens, length)
            kept.append(query.new_empty(scores))
            if self._dropout > 0:
                kept += [query.new_empty(scores), query.new_empty(scores, dtype=torch.bool)]
        else:
            kept.append(query.new_empty((batch, heads, tokens), dtype=torch.float32))
        if kernel is AttentionKernel.TE_FLASH and batch > 1:
            kept.append(query.new_empty(output))  # the kernel's output is transposed to be the projection's input
        if is_masked:
            kept.append(query.new_empty((1, 1, tokens, length) if mask is None else mask.shape))
        pairs = float(length) ** 2 if kernel.keeps_scores or is_masked else _causal_pairs(length, self._window)
        flops = 2.0 * batch * heads * (channels + of_value) * pairs / ranks
        again = 2.0 if kernel.keeps_scores else 2.5
        return _kernel(output, query, key, value, kept=kept, flops=(flops, again * flops))


def _causal_pairs(length: int, window: tuple[int, int] | None) -> float:
    """Return how many query-key pairs a causal mask allows; if `window` is given, only keys inside the window count."""
    reach = length if window is None or window[0] < 0 else min(window[0], length)
    return length * reach - reach**2 / 2


_OPERATORS = torch.library.Library("zero_bubble", "FRAGMENT")
_OPERATORS.define("work(Tensor like, float flops) -> Tensor")
_OPERATORS.impl("work", lambda like, flops: like.new_empty(0), "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.zero_bubble.work)
def _flops_of_work(like: Any, flops: float, **_: Any) -> float:
    """Let torch's FLOP counter include the arithmetic operations of kernels that are not operators of torch."""
    return flops


def convolution_backward_flops(*arguments: Any, out_shape: Any, **_: Any) -> float:
    """Count the arithmetic operations of a convolution's backward, where torch's own formula ignores the groups.

    Args:
        arguments: the arguments of `aten.convolution_backward`, with the shape of each tensor in its place.
    """
    *given, groups, (of_input, of_weight, _) = arguments
    formula: Any = conv_backward_flop  # torch types the shapes only
    count = partial(formula, *given, groups, out_val=out_shape)
    return count([of_input, False, False]) + count([False, of_weight, False]) / groups


class _Kernel(torch.autograd.Function):
    """An autograd function whose output has the shape `shape`, and which keeps the tensors `kept` for its backward.

    Args:
        flops: numbers of operations of the forward and of the backward.
    """

    @staticmethod
    def forward(ctx: Any, shape: Any, kept: Any, flops: tuple[float, float], *inputs: torch.Tensor) -> torch.Tensor:
        torch.ops.zero_bubble.work(inputs[0], flops[0])
        ctx.save_for_backward(*kept)
        ctx.flops, ctx.inputs = flops[1], [(tensor.shape, tensor.dtype) for tensor in inputs]
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        torch.ops.zero_bubble.work(grad, ctx.flops)
        return None, None, None, *(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)


def _kernel(shape: Any, *inputs: torch.Tensor, kept: Any = (), flops: Any = (0.0, 0.0)) -> torch.Tensor:
    return _Kernel.apply(shape, kept, flops, *inputs)


def _norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Replacement of a norm's forward; its operator keeps only the norm's input for the backward."""
    return _kernel(hidden.shape, hidden, *norm.parameters(), kept=(hidden,))


def _scan(mixer: Any, projected: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
    """Replacement of the fused kernel of `mamba_ssm`; counts the operations that Megatron-LM estimates for the
    kernel."""
    projected = projected.transpose(0, 1).contiguous()
    batch, tokens, _ = projected.shape
    width = mixer.cp.nheads_local_tpcp * mixer.headdim
    flops = 7.0 * batch * tokens * width * mixer.d_state
    kept = (projected, projected.new_empty(batch, tokens, width))  # the input, and the output before the gate
    result = _kernel((tokens, batch, width), projected, kept=kept, flops=(flops, 2 * flops))
    return mixer.norm(result) if mixer.rmsnorm else result


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Replacement of the gated delta rule of `fla`; counts the operations that Megatron-LM estimates for the rule."""
    batch, tokens, heads, size = v.shape
    flops = 8.0 * batch * tokens * heads * size**2
    kept = (q, k, v, g, beta, v.new_empty(batch, tokens, heads, 64))  # the last tensor has a matrix for every 64 tokens
    return _kernel(v.shape, q, k, v, g, beta, kept=kept, flops=(flops, 2 * flops)), None


def _duplicate(attention: Any) -> None:
    """Give every tensor-parallel rank a whole copy of latent attention's down projections, as in Transformer Engine."""
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if (split := getattr(attention, name, None)) is not None:
            whole = ColumnParallelLinear(
                split.input_size,
                split.output_size,
                config=split.config,
                init_method=split.config.init_method,
                bias=False,
                gather_output=False,
                tp_group=parallel_state.get_pipeline_model_parallel_group(),  # a group of one rank
            )
            whole.weight.tensor_model_parallel = False
            setattr(attention, name, whole)
