"""Splits the backward of megatron-core's linear layers into B and W.

`split_weight_gradients` binds another `_forward_impl` to each ColumnParallelLinear and RowParallelLinear *instance* of
a model; nothing is patched globally. The forward of a linear layer is megatron-core's own. Inside
`WeightGradStore.deferring()`, backward computes only the gradients of the input and of the bias, and puts into the
store a function that computes the weight's gradient. Outside of `WeightGradStore.deferring()`, megatron-core's own
fused backward runs.

Modules of Transformer Engine defer W themselves; `transformer_engine.py` puts the W of these modules into the store.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.mcore.transformer_engine import deferred_parameters, defers_by_itself, put_into_store
from megatron.zero_bubble.mcore.weight_grad import DeferredWeightGrad, SplitWeight, has_hooks, placeholder_gradient
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

_Linear = layers.LinearWithGradAccumulationAndAsyncCommunication
_SPLIT_LAYERS = (ColumnParallelLinear, RowParallelLinear)
_NUM_ARGUMENTS = 10
"""Number of arguments that the forward of megatron-core's linear autograd function has up to version 0.18. Later
versions of megatron-core append the arguments `gtp_remat_size` and `output_dtype`."""
_LATER_ARGUMENTS = (1, None)[: len(inspect.signature(_Linear.forward).parameters) - _NUM_ARGUMENTS]


def split_weight_gradients(model_chunks: Iterable[torch.nn.Module], store: WeightGradStore) -> list[str]:
    """Make every linear layer of the model put its W into `store` when a backward runs inside `store.deferring()`.

    Call `split_weight_gradients` before the model is wrapped in DDP, whose config must set `delay_wgrad_compute`.

    Returns:
        The names of the parameters whose gradient is now computed in W.

    Raises:
        ValueError: a layer has a setting under which its W cannot be deferred, or the model is already wrapped in DDP.
    """
    split: list[str] = []
    weights: dict[torch.nn.Parameter, SplitWeight] = {}
    for chunk in model_chunks:
        if hasattr(chunk, "ddp_config"):
            raise ValueError(
                f"split_weight_gradients() must be called before the model is wrapped in {type(chunk).__name__}"
            )
        tied = tied_output_layer(chunk)
        for name, module in chunk.named_modules():
            if isinstance(module, _SPLIT_LAYERS) and module is not tied:
                if _can_be_split(module):
                    split.append(f"{name}.weight")
                    _split_layer(module, weights.setdefault(module.weight, SplitWeight(module.weight, name, store)))
            elif defers_by_itself(module):
                put_into_store(module, store)
                split += [f"{name}.{parameter}" for parameter in deferred_parameters(module)]
    return split


def tied_output_layer(chunk: torch.nn.Module) -> torch.nn.Module | None:
    """Return the output layer if the embedding on the same stage provides the output layer's weight, else None.

    With multi-token prediction, a tied output layer computes the logits with the weight of the last stage's copy of the
    embedding, and the output layer's own weight is unused. Autograd sums the gradients of all uses of the embedding's
    weight in B, so the backward of an output layer that uses this weight is not split into B and W.
    """
    model: Any = unwrap_model(chunk)
    layer = getattr(model, "output_layer", None)
    if layer is None or not getattr(model, "share_embeddings_and_output_weights", False):
        return None
    return layer if model.shared_embedding_or_output_weight() is not layer.weight else None


def _can_be_split(layer: Any) -> bool:
    """Whether the backward of a linear layer can be split into B and W.

    B and W stay together in a layer of a class that computes its forward in another way, in an output layer without a
    weight of its own (on the embedding's stage), in a layer whose weight is computed from other parameters (by
    `torch.nn.utils.parametrizations`, for example), and with another type of logits (`--output-logit-dtype` of
    megatron-core 0.20).

    Raises:
        ValueError: the layer has a setting under which its W cannot be deferred.
    """
    computes_as_usual = any(type(layer)._forward_impl is kind._forward_impl for kind in _SPLIT_LAYERS)
    weight = layer._parameters.get("weight")
    if not computes_as_usual or weight is None or getattr(layer, "output_dtype", None) is not None:
        return False
    if layer.config.defer_embedding_wgrad_compute:
        raise ValueError(
            "defer_embedding_wgrad_compute defers the output layer's weight gradient a second time: switch it off"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError("gtp_remat_size above 1 shards weights, but W accumulates whole gradients: set it to 1")
    return weight.requires_grad


def _split_layer(layer: Any, split_weight: SplitWeight) -> None:
    # Tells megatron-core's DDP that this parameter's gradient comes through a hook of its module, not from autograd.
    layer.weight.skip_backward_post_hook = True
    layer.register_wgrad_accumulation_and_reduce_hooks = split_weight.set_hook
    layer._forward_impl = partial(_forward_impl, layer, split_weight, layer._forward_impl)


@torch.compiler.disable
def _forward_impl(
    layer: Any,
    split_weight: SplitWeight,
    unsplit: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: int | None = None,
    gtp_remat_size: int = 1,
    output_dtype: None = None,
) -> torch.Tensor:
    """Replace a linear layer's `_forward_impl`; only megatron-core 0.19 and later pass the last two arguments.

    `torch.compile` compiles the code before and after a split layer: a compiled backward could not defer W.

    Args:
        layer: the linear layer.
        split_weight: the layer's own weight.
        unsplit: megatron-core's `_forward_impl`, which runs if `weight` is frozen or is not the layer's own parameter
            (under FSDP2, the gathered copy) but, for example, a sum of this parameter and an adapter's weight.
    """
    assert gtp_remat_size == 1, "such a layer was not split"
    assert output_dtype is None, "such a layer was not split"
    settings = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
    # `torch.func.functional_call` puts computed tensors in the places of parameters.
    if weight is not layer._parameters.get("weight") or not weight.requires_grad or not weight.is_leaf:
        buffers = {"grad_output_buffer": grad_output_buffer, "wgrad_deferral_limit": wgrad_deferral_limit}
        return unsplit(input, weight, bias, *settings, **buffers, tp_group=tp_group)
    return _SplitLinear.apply(split_weight, input, weight, bias, *settings, tp_group)


class _SplitLinear(torch.autograd.Function):
    """megatron-core's autograd function of a linear layer, with a backward that can defer W."""

    @staticmethod
    def forward(
        ctx: Any,
        split_weight: SplitWeight,
        input: torch.Tensor,
        weight: torch.Tensor,
        *settings: Any,
    ) -> torch.Tensor:
        ctx.split_weight = split_weight
        # The parameter is kept, too, because saved-tensor hooks can replace the saved tensor by another object.
        ctx.weight = weight
        *flags, tp_group = settings
        return _Linear.forward(ctx, input, weight, *flags, None, None, tp_group, *_LATER_ARGUMENTS)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_weight = None
        if ctx.split_weight.store.defers(ctx.weight) and not has_hooks(ctx.weight):
            grad_input, grad_bias = _input_grad(ctx, grad_output)
        else:
            grad_input, grad_weight, grad_bias = _Linear.backward(ctx, grad_output)[:3]
            if grad_weight is None and ctx.gradient_accumulation_fusion:
                # Saved-tensor hooks have replaced the weight by a tensor without DDP's attributes, for which
                # megatron-core returns no placeholder.
                ctx.weight.grad_added_to_main_grad = True
                grad_weight = placeholder_gradient(ctx.weight)
        return None, grad_input, grad_weight, grad_bias, None, None, None, None


def _input_grad(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run B of one layer: return the gradients of the layer's input and bias, and put the layer's W into the store."""
    saved_input, weight = ctx.saved_tensors
    grad_input = grad_output.matmul(weight)
    handle = None
    if ctx.allreduce_dgrad:
        handle = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    elif ctx.sequence_parallel:
        full_grad_input, grad_input = grad_input, torch.empty_like(saved_input)
        handle = dist.reduce_scatter_tensor(grad_input, full_grad_input, group=ctx.tp_group, async_op=True)
    # The following lines run while the tensor-parallel ranks exchange the input's gradient.
    grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0) if ctx.use_bias else None
    # Detached, because an attached tensor keeps the graph of other layers alive until W, and makes autograd record W. A
    # gradient has a graph if a backward returns a tensor of its forward, as the loss's backward does in fp32.
    saved_input, grad_output = saved_input.detach(), grad_output.detach()
    held, gather_group = (saved_input, grad_output), ctx.tp_group if ctx.sequence_parallel else None
    deferred = DeferredWeightGrad(
        ctx.split_weight, ctx.weight, *held, is_fused=ctx.gradient_accumulation_fusion, gather_group=gather_group
    )
    ctx.split_weight.store.put(deferred.run, held=held, parameter=ctx.weight, start=deferred.start_to_gather)
    if handle is not None:
        handle.wait()
    return grad_input, grad_bias


def fuses_accumulation() -> bool:
    """Tell whether W can add weight gradients of megatron-core's own linear layers straight into `main_grad`.

    Fusing W with the addition to `main_grad` needs a GPU and apex.
    """
    return torch.cuda.is_available() and layers._grad_accum_fusion_available


_EMBEDDINGS = (VocabParallelEmbedding, torch.nn.Embedding)
_LINEAR = (*_SPLIT_LAYERS, torch.nn.Linear)
_NEVER_DEFER = frozenset({"GroupedMLP", "TELMHeadColumnParallelLinear"})
"""Names of megatron-core's classes whose `backward_dw()` does nothing, because B computes their weight gradients. Each
class exists only in some versions of megatron-core."""


@dataclass(frozen=True)
class Gradients:
    """Numbers of parameters on one rank, grouped by the operation that computes the gradients of the parameters.

    Attributes:
        total: number of all trained parameters.
        in_w: number of parameters whose gradients W computes.
        embeddings: number of parameters in embedding tables; the gradient of an embedding table is a sum of rows, and
            not a matrix product that could be deferred.
        vectors: number of parameters in biases and norms, whose gradients are sums and not matrix products.
        unsplit: the parameters that are not counted in `in_w`, `embeddings` or `vectors`. B computes the gradients of
            the parameters in `unsplit`, by matrix products or in unknown ways. Each element of `unsplit` is a pair: a
            module's `name (Class)`, and the number of the module's parameters that count as unsplit. In a module's
            name, `*` stands for the number of a layer or expert.
        missed: names of the modules in `unsplit` that could defer W but do not. A module could defer W if the module is
            a linear layer, or has `backward_dw()` and no submodules. The `backward_dw()` of a module with submodules,
            such as an MLP, only calls the `backward_dw()` of the submodules.
    """

    total: int
    in_w: int
    embeddings: int
    vectors: int
    unsplit: tuple[tuple[str, int], ...]
    missed: tuple[str, ...] = ()


def count_gradients(model_chunks: Iterable[torch.nn.Module]) -> Gradients:
    """Count the parameters of model chunks by the operation that computes the gradients; the chunks may be wrapped.

    Call `count_gradients` after `split_weight_gradients`.
    """
    counts = Counter(total=0, in_w=0, embeddings=0, vectors=0)
    unsplit: Counter[str] = Counter()
    missed = set()
    chunks = list(model_chunks)
    tied = {layer: unwrap_model(chunk) for chunk in chunks if (layer := tied_output_layer(chunk)) is not None}
    multiplied = {model.shared_embedding_or_output_weight() for model in tied.values()}
    for name, module, parameter in _trained_parameters(chunks):
        counts["total"] += parameter.numel()
        is_hooked = has_hooks(parameter)
        if getattr(parameter, "skip_backward_post_hook", False) and not is_hooked:
            counts["in_w"] += parameter.numel()
        elif parameter in multiplied:
            unsplit[f"output_layer ({ColumnParallelLinear.__name__})"] += parameter.numel()
        elif isinstance(module, _EMBEDDINGS):
            counts["embeddings"] += parameter.numel()
        elif parameter.dim() < 2:
            counts["vectors"] += parameter.numel()
        else:
            kind = f"{name} ({type(module).__name__})"
            unsplit[kind] += parameter.numel()
            is_leaf = next(module.children(), None) is None
            can_be_split = isinstance(module, _LINEAR) or (is_leaf and hasattr(module, "backward_dw"))
            is_kept = parameter.dim() != 2 or is_hooked or module in tied
            is_kept |= getattr(module, "output_dtype", None) is not None
            is_kept |= any(kind.__name__ in _NEVER_DEFER for kind in type(module).__mro__)
            if can_be_split and not is_kept:
                missed.add(kind)
    return Gradients(**counts, unsplit=tuple(sorted(unsplit.items())), missed=tuple(sorted(missed)))


def _trained_parameters(chunks: Iterable[Any]) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
    """Yield one tuple (name of the module, module, parameter) for every trained parameter."""
    seen = set()
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    # The name leaves out `module.` of wrappers, and has `*` in place of the number of a layer.
                    yield re.sub(r"(?<![^.])\d+(?![^.])", "*", re.sub(r"^(module\.)+", "", name)), module, parameter
