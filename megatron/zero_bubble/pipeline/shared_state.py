"""Refuses parameters and buffers shared by layers on several stages, because each stage would change its own copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatron.zero_bubble.pipeline.boundaries import Boundaries
from megatron.zero_bubble.pipeline.forward_state import renormalized
from megatron.zero_bubble.pipeline.messages import gets_gradient
from megatron.zero_bubble.pipeline.specs import LayerSpec, built_on_meta, tie_of, words_of


def refuse_shared(layers: Sequence[Any], stages: Boundaries) -> None:
    """Check, before layers are built, that stages share no state except tied parameters.

    Args:
        stages: the index of the first layer of every stage, followed by the number of layers.

    Raises:
        ValueError: layers on two stages share a parameter or a persistent buffer without a `TiedLayerSpec`; tied
            layers with the same key differ in class or shapes; or a layer that is tied across stages has persistent
            buffers, `max_norm` or `sparse=True`.
    """
    stage_of = {index: stage for stage, (first, end) in enumerate(pairwise(stages)) for index in range(first, end)}
    owners: dict[torch.Tensor, int] = {}
    for index, layer in enumerate(layers):
        for kind, name, tensor in _state_of(_existing_module(layer)):
            other = owners.setdefault(tensor, index)
            if stage_of[other] != stage_of[index]:
                raise ValueError(
                    f"layers {other} and {index} share a {kind} ({name} in layer {index}), but are on stages "
                    f"{stage_of[other]} and {stage_of[index]}: {_REMEDIES[kind]}"
                )
    tied: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if (key := tie_of(layer)) is not None:
            tied.setdefault(key, []).append(index)
    for key, indices in tied.items():
        _check_tie(key, {index: layers[index] for index in indices}, len({stage_of[index] for index in indices}) > 1)


_REMEDIES = {
    "parameter": "make both of TiedLayerSpec with one key",
    "buffer": "give each layer a copy, or register a constant buffer with persistent=False",
}


def _existing_module(layer: Any) -> nn.Module | None:
    """Return the module of a layer if the module or a part of it exists before the layers are built, otherwise None.

    A layer may be a module itself, or a `LayerSpec` with a module or a parameter among its arguments.
    """
    if not isinstance(layer, LayerSpec):
        return layer if isinstance(layer, nn.Module) else None
    given = pytree.tree_leaves((layer.args, layer.kwargs))
    return _on_meta(layer) if any(isinstance(each, nn.Module | nn.Parameter) for each in given) else None


def _on_meta(spec: LayerSpec) -> nn.Module | None:
    try:
        return built_on_meta(spec)
    except Exception:  # the rank that holds the layer will raise the error
        return None


def _state_of(module: nn.Module | None) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (kind, name, tensor) of a module's parameters and persistent buffers; other buffers count as constants."""
    for prefix, inside in () if module is None else module.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in inside.named_parameters(recurse=False):
            yield "parameter", path + name, parameter
        for name, buffer in inside.named_buffers(recurse=False):
            if name not in inside._non_persistent_buffers_set:
                yield "buffer", path + name, buffer


def _check_tie(key: str, specs: dict[int, LayerSpec], is_on_stages: bool) -> None:
    words: dict[str, int] = {}
    for index, spec in specs.items():
        if (module := _on_meta(spec)) is None:
            continue
        words.setdefault(words_of(module), index)
        if is_on_stages and (untied := _untied_state(module)):
            raise ValueError(f"TiedLayerSpec({key!r}): layer {index} has {untied}, which cannot be tied over stages")
    if len(words) > 1:
        layers = " and ".join(f"{each} in layer {index}" for each, index in list(words.items())[:2])
        raise ValueError(
            f"TiedLayerSpec({key!r}) is {layers}: layers with one key need one class and the same arguments; use "
            "forward=... where a layer computes something else"
        )


def _untied_state(module: nn.Module) -> str | None:
    """Return the name of a property that rules out copies of a module on several stages; None if there is none.

    With `max_norm`, a lookup in one copy scales only the weights of that copy, so that the copies would differ. A
    `TiedLayer` does not sum sparse gradients.
    """
    if any(kind == "buffer" for kind, *_ in _state_of(module)):
        return "buffers"
    for table in renormalized(module):
        return f"max_norm={table.max_norm}"
    is_sparse = any(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in module.modules())
    return "sparse=True" if is_sparse else None


def parameters_behind(value: Any, seen: set[Any]) -> Iterator[nn.Parameter]:
    """Yield the parameters in the autograd graph of the tensors in `value`.

    Args:
        seen: nodes of the autograd graph that are skipped; every visited node is added to `seen`.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and gets_gradient(leaf)]
    pending = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
                yield variable
            pending += [following for following, _ in node.next_functions if following is not None]
