"""Refuses a pipeline whose ranks were given different arguments; otherwise those of one rank would count."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron.zero_bubble.pipeline.interconnect import Agreement
from megatron.zero_bubble.pipeline.specs import class_name_of
from megatron.zero_bubble.schedule import Schedule
from megatron.zero_bubble.schedule.formats import schedule_to_json

Words = dict[str, str | list[str]]
"""Argument of `Pipeline` -> its value in words; a list for arguments with an entry a layer."""


def check_same_arguments(agreement: Agreement, layers: Sequence[Any], others: Mapping[str, Any]) -> None:
    """Compare the arguments of all ranks; a collective call.

    Raises:
        ValueError: on every rank, if an argument differs between two ranks, or num_microbatches is no whole number.
    """
    first, *following = agreement.collect(lambda: _argument_texts(layers, others))
    for rank, words in enumerate(following, start=1):
        for name, value in words.items():
            if value != first[name]:
                raise ValueError(
                    f"all ranks of a pipeline need the same {name}: {_difference(first[name], value, rank)}"
                )


def _argument_texts(layers: Sequence[Any], others: Mapping[str, Any]) -> Words:
    count = others["num_microbatches"]
    if type(count) is not int or count < 1:
        raise ValueError(f"num_microbatches must be a whole number of at least 1, got {count!r}")
    words = {
        name: _schedule_words(value) if isinstance(value, Schedule) else repr(value) for name, value in others.items()
    }
    return {**words, "layers": [_layer_words(layer) for layer in layers]}


def _schedule_words(schedule: Schedule) -> str:
    digest = hashlib.sha256(schedule_to_json(schedule).encode()).hexdigest()
    return f"{schedule.name} ({schedule.num_microbatches} microbatches, digest {digest[:8]})"


def _layer_words(layer: Any) -> str:
    if not isinstance(layer, nn.Module):
        return class_name_of(layer)
    shapes = ", ".join("x".join(map(str, parameter.shape)) for parameter in layer.parameters())
    return f"{class_name_of(layer)}({shapes})"


def _difference(first: str | list[str], other: str | list[str], rank: int) -> str:
    if isinstance(first, str):
        return f"rank 0 has {first}, rank {rank} has {other}"
    if len(first) != len(other):
        return f"rank 0 has {len(first)}, rank {rank} has {len(other)}"
    index = next(index for index, (mine, two) in enumerate(zip(first, other, strict=True)) if mine != two)
    return f"layer {index} is {first[index]} on rank 0 and {other[index]} on rank {rank}"
