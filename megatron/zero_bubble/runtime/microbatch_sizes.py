"""Reads the size of a microbatch from the data of the microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize

_TOKENS = ("tokens", "input_ids", "text", "labels", "position_ids")


def size_of(item: Any) -> MicrobatchSize | None:
    """Return the size of a microbatch, or None if the microbatch has no field that determines the size.

    The lengths of packed sequences come from `cu_seqlens`. With an `attention_mask` of shape `[batch, sequence]`,
    padding is not part of the size. With neither `cu_seqlens` nor a two-dimensional mask, the shape `[batch, sequence]`
    of the first tensor of token ids determines the size; the tensor may be a nested tensor of layout `torch.jagged`.

    Args:
        item: the data of the microbatch: a tensor, a sequence of tensors, or a mapping whose keys are names from
            Megatron (such as `tokens`) or from Hugging Face (such as `input_ids`).
    """
    if isinstance(item, torch.Tensor):
        item = [item]
    if hasattr(item, "keys"):
        return _size_of_mapping({str(name): item[name] for name in item.keys()})  # noqa: SIM118 (a TensorDict)
    if isinstance(item, Sequence) and not isinstance(item, str):
        return next((_size_of_whole(each) for each in item if _is_tokens(each)), None)
    return None


def _size_of_mapping(item: Mapping[str, Any]) -> MicrobatchSize | None:
    offsets = item.get("cu_seqlens")
    if isinstance(offsets, torch.Tensor):
        # In some data sets, `cu_seqlens` is padded to a fixed number of entries.
        lengths = offsets.flatten().diff()
        return MicrobatchSize.of(lengths[lengths > 0].tolist())
    mask = item.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_nested:
        return MicrobatchSize.of(mask.bool().sum(-1).tolist())
    return next((_size_of_whole(item[name]) for name in _TOKENS if _is_tokens(item.get(name))), None)


def _is_tokens(value: Any) -> bool:
    is_readable = isinstance(value, torch.Tensor) and (not value.is_nested or value.layout is torch.jagged)
    return is_readable and value.dim() == 2 and not value.is_floating_point()


def _size_of_whole(tokens: Any) -> MicrobatchSize:
    if tokens.is_nested:
        lengths = tokens.lengths()  # None if the sequences lie one behind the other
        return MicrobatchSize.of((tokens.offsets().diff() if lengths is None else lengths).tolist())
    batch, length = tokens.shape
    return MicrobatchSize.of([length] * batch)
