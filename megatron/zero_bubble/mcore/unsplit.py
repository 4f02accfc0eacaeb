"""What of a model's gradients stays in B: the parameters that no split layer holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

_EMBEDDINGS = (VocabParallelEmbedding, torch.nn.Embedding)


@dataclass(frozen=True)
class Gradients:
    """Where the gradients of one rank's parameters are computed, in numbers of parameters.

    Attributes:
        total: all parameters that are trained.
        in_w: weights of split layers, whose gradient is deferred.
        embeddings: tables, whose gradient is a sum of rows: no product that could be put off.
        vectors: norms and biases, whose gradient is a sum as well.
        unsplit: every other weight, by `name (Class)` of its module, layers and experts taken together
            as `*`: its gradient is a matrix product, or something unknown, and B pays for it.
    """

    total: int
    in_w: int
    embeddings: int
    vectors: int
    unsplit: tuple[tuple[str, int], ...]


def count_gradients(model_chunks: Iterable[torch.nn.Module]) -> Gradients:
    """Call it after `split_weight_gradients`, before or after the chunks are wrapped."""
    counts: Counter[str] = Counter()
    unsplit: Counter[str] = Counter()
    for name, module, parameter in _parameters(model_chunks):
        counts["total"] += parameter.numel()
        if getattr(parameter, "skip_backward_post_hook", False):
            counts["in_w"] += parameter.numel()
        elif isinstance(module, _EMBEDDINGS):
            counts["embeddings"] += parameter.numel()
        elif parameter.dim() < 2:
            counts["vectors"] += parameter.numel()
        else:
            unsplit[f"{name} ({type(module).__name__})"] += parameter.numel()
    return Gradients(
        counts["total"], counts["in_w"], counts["embeddings"], counts["vectors"], tuple(sorted(unsplit.items()))
    )


def _parameters(
    model_chunks: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
    """Every trained parameter once, with the module that holds it and that module's name."""
    seen = set()
    for chunk in model_chunks:
        for name, module in chunk.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    # Without the wrappers' `module.`, and with all layers as one.
                    yield re.sub(r"(?<![^.])\d+(?![^.])", "*", re.sub(r"^(module\.)+", "", name)), module, parameter
