"""Counts the parameters whose gradient W computes and those whose gradient stays in B."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.mcore.linear import tied_output_layer

_EMBEDDINGS = (VocabParallelEmbedding, torch.nn.Embedding)
_LINEAR = (ColumnParallelLinear, RowParallelLinear, torch.nn.Linear)


@dataclass(frozen=True)
class Gradients:
    """Numbers of parameters of one rank, by where their gradients are computed.

    Attributes:
        total: all parameters that are trained.
        in_w: weights of split layers, whose gradient W computes.
        embeddings: tables, whose gradient is a sum of rows and not a matrix product that could be deferred.
        vectors: norms and biases, whose gradient is a sum as well.
        unsplit: all other weights, by `name (Class)` of their module, with `*` for the numbers of layers and experts.
            Their gradient is a matrix product or unknown, and B computes it.
        missed: those of `unsplit` that are linear layers, or layers that can defer W by `backward_dw()`, but do not.
    """

    total: int
    in_w: int
    embeddings: int
    vectors: int
    unsplit: tuple[tuple[str, int], ...]
    missed: tuple[str, ...] = ()


def count_gradients(model_chunks: Iterable[torch.nn.Module]) -> Gradients:
    """Count one rank's gradients; called after `split_weight_gradients`, before or after the chunks are wrapped."""
    counts: Counter[str] = Counter()
    unsplit: Counter[str] = Counter()
    missed = set()
    chunks = list(model_chunks)
    tied = {layer: unwrap_model(chunk) for chunk in chunks if (layer := tied_output_layer(chunk)) is not None}
    multiplied = {model.shared_embedding_or_output_weight() for model in tied.values()}
    for name, module, parameter in _trained_parameters(chunks):
        counts["total"] += parameter.numel()
        if getattr(parameter, "skip_backward_post_hook", False):
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
            can_be_split = isinstance(module, _LINEAR) or hasattr(module, "backward_dw")
            is_kept = parameter.dim() != 2 or getattr(module, "output_dtype", None) is not None or module in tied
            if can_be_split and not is_kept:
                missed.add(kind)
    return Gradients(
        counts["total"],
        counts["in_w"],
        counts["embeddings"],
        counts["vectors"],
        tuple(sorted(unsplit.items())),
        tuple(sorted(missed)),
    )


def _trained_parameters(
    model_chunks: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
    """Yield every trained parameter once, after the name of the module that holds it and the module."""
    seen = set()
    for chunk in model_chunks:
        for name, module in chunk.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    # Without the wrappers' `module.`, and with all layers as one.
                    yield re.sub(r"(?<![^.])\d+(?![^.])", "*", re.sub(r"^(module\.)+", "", name)), module, parameter
