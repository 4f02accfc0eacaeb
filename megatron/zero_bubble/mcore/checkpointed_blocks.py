"""Separates the recomputation R of a fully recomputed block of layers from the block's backward.

megatron-core checkpoints blocks of whole layers: the forward of a block keeps only the block's input, and the block's
backward first runs the forward again. megatron-core recomputes with `CheckpointFunction`. During F, `split_checkpoints`
replaces `CheckpointFunction`. Each block either keeps its activations, or drops its activations and puts a function for
its recomputation into the `RecomputationStore`. The backward of a block that dropped its activations uses the autograd
graph that the recomputation has made. Outputs, random states and gradients are bitwise equal to megatron-core's.

Activation checkpoints inside a block, and Transformer Engine's activation checkpoints (fp8 and fp4), are not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import megatron.core
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import safely_set_viewless_tensor_data
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import detach_variable

from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.mcore.restart import copied_rng_states
from megatron.zero_bubble.runtime.recomputation_store import Blocks, ForwardMode, RecomputationStore


def checkpoint_every_layer(config: Any) -> None:
    """Change a megatron-core config so that a model can recompute any of its layers as a separate block.

    The config is changed after its construction, because the schedule, not the user's flags, chooses the recomputed
    layers.
    """
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1


def shorter_last_blocks() -> AbstractContextManager[None]:
    """Let megatron-core 0.16 recompute a stage's last block even if it is shorter than `recompute_num_layers`.

    If the last block has fewer than `recompute_num_layers` layers, megatron-core 0.16 also calls `_get_layer` with
    indices beyond the last layer of the stage. For these indices, the replacement of `_get_layer` returns a layer that
    computes the identity.
    """
    if not megatron.core.__version__.startswith("0.16."):
        return nullcontext()

    def layer(stage: TransformerBlock, index: int) -> Any:
        return stage.layers[index] if index < len(stage.layers) else _NoLayer()

    return replaced(TransformerBlock, "_get_layer", layer)


class _NoLayer:
    layer_number = 1

    def __call__(self, hidden_states: torch.Tensor, context: Any, **others: Any) -> tuple[torch.Tensor, Any]:
        return hidden_states, context


@contextmanager
def split_checkpoints(store: RecomputationStore | None) -> Iterator[None]:
    """Let forwards inside the `with` block drop or keep the activations of checkpointed blocks, depending on
    `Blocks.mode`.

    If `store` or `store.current` is None, the backward of a block runs the block's forward again, as in megatron-core.
    """
    with _further_layers_checkpointed():
        if store is None or store.current is None:
            yield
            return
        run_block = partial(_run_block, store.current, random.CheckpointFunction)
        with replaced(random, "CheckpointFunction", SimpleNamespace(apply=run_block)):
            yield


def _further_layers_checkpointed() -> AbstractContextManager[None]:
    """Let megatron-core 0.18 checkpoint the layers of multi-token prediction.

    In megatron-core 0.18, the forward of such a layer passes a padding mask to `_checkpointed_forward`, which has no
    parameter for the mask.
    """
    if not megatron.core.__version__.startswith("0.18."):
        return nullcontext()
    original: Any = MultiTokenPredictionLayer._checkpointed_forward

    def checkpointed(layer: Any, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if padding_mask is not None:
            raise ForwardStepError(
                "megatron-core 0.18 cannot recompute multi-token prediction with a padding mask: use version 0.19"
            )
        return original(layer, *args, **kwargs)

    return replaced(MultiTokenPredictionLayer, "_checkpointed_forward", checkpointed)


def _run_block(
    blocks: Blocks,
    original: Any,
    run: Callable[..., Any],
    distribute_saved: bool,
    *inputs: Any,
) -> Any:
    """Run the forward of a block, and drop or keep the block's activations, depending on `blocks.mode`.

    Activation checkpoints inside the block use `original`, which is megatron-core's own `CheckpointFunction`.
    """
    with replaced(random, "CheckpointFunction", original):
        if blocks.mode is ForwardMode.DROP:
            inputs = _with_gradient(inputs) if torch.is_grad_enabled() else inputs
            return _DroppedBlock.apply(blocks, run, distribute_saved, *inputs)
        with blocks.suspended():
            outputs = run(*inputs)
        blocks.keep(inputs, outputs if isinstance(outputs, tuple) else (outputs,))
        return outputs


def _with_gradient(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a block's inputs, of which at least one needs a gradient.

    Behind a frozen embedding, no input needs a gradient, but the block's backward has to run for the gradients of the
    block's parameters.
    """
    numbers = [k for k, each in enumerate(inputs) if isinstance(each, torch.Tensor) and each.is_floating_point()]
    if not numbers or any(inputs[k].requires_grad for k in numbers):
        return inputs
    first = numbers[0]
    return *inputs[:first], inputs[first].detach().requires_grad_(), *inputs[first + 1 :]


class _DroppedBlock(torch.autograd.Function):
    """Runs a block's forward without keeping activations. R or B recomputes the activations for the backward."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, run: Any, distribute_saved: bool, *inputs: Any) -> Any:
        rng_states = copied_rng_states()
        with blocks.suspended():
            outputs = random.CheckpointFunction.forward(ctx, run, distribute_saved, *inputs)
        ctx.recomputed, ctx.rng_states = None, rng_states
        # Saved tensors may be copies, if saved-tensor hooks pack them.
        ctx.divided_input = inputs[0] if distribute_saved else None
        # Without a gradient to compute, backward never runs.
        if any(ctx.needs_input_grad):
            ctx.during_backward = blocks.put(partial(_recompute, ctx))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> tuple[Any, ...]:
        with ctx.during_backward():
            inputs, outputs = ctx.recomputed
            ctx.recomputed = None
            edges, grads = zip(
                *((edge, grad) for edge, grad in zip(outputs, output_grads, strict=True) if edge), strict=True
            )
            # The oldest supported torch does not accept gradient edges in `torch.autograd.backward`.
            torch.autograd.Variable._execution_engine.run_backward(
                edges, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        return None, None, None, *(input.grad if isinstance(input, torch.Tensor) else None for input in inputs)


def _recompute(ctx: Any) -> None:
    """Run a block's forward again under autograd, with the random numbers of the block's first forward."""
    inputs = ctx.saved_tensors
    if ctx.distribute_saved_activations:
        whole = random.gather_split_1d_tensor(inputs[0].data).view(ctx.input_0_shape)
        for divided in (inputs[0], ctx.divided_input):
            safely_set_viewless_tensor_data(divided, whole)
    inputs = detach_variable(inputs)
    with random._fork_rng(), torch.enable_grad():
        random._set_all_rng_states(*ctx.rng_states)
        outputs = ctx.run_function(*inputs)
    ctx.run_function = ctx.rng_states = ctx.divided_input = None
    # The backward of an output starts at its gradient edge, which, unlike the output, holds no activations.
    edges = (
        get_gradient_edge(output) if isinstance(output, torch.Tensor) and output.requires_grad else None
        for output in (outputs if isinstance(outputs, tuple) else (outputs,))
    )
    ctx.recomputed = inputs, tuple(edges)
