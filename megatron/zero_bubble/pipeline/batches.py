"""Divides a batch into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from megatron.zero_bubble.pipeline.messages import Constant, MessageSpec, StageMessage
from megatron.zero_bubble.runtime.microbatch_sizes import size_of
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize


class Microbatches(NamedTuple):
    """Inputs and targets of each microbatch of a step."""

    inputs: list[Any]
    targets: list[Any]


Load = Callable[[], Microbatches]
"""Function that returns the microbatches of a step; called on the ranks of the first and the last stage."""


def microbatches_of(batch: Any, count: int, device: torch.device) -> Microbatches:
    """Divide a batch into `count` microbatches, and move their tensors to `device`.

    If `batch` is a pair (inputs, targets), its tensors are split along their first dimension. If `batch` is an
    iterator, each of its elements is one microbatch, a pair (inputs, targets).

    Raises:
        ValueError: `batch` has a wrong type; tensors in `batch` have unequal lengths or a length that is no multiple of
            `count`; a pair contains data of samples in another form than tensors; the iterator `batch` fails or ends
            before `count` microbatches; or tensors cannot be split or moved.
    """
    try:
        return _divided(batch, count, device)
    except ValueError:
        raise
    except Exception as error:
        # Other ranks learn of a ValueError only.
        raise ValueError(f"the batch cannot be used: {type(error).__name__}: {one_line(error)}") from error


def _divided(batch: Any, count: int, device: torch.device) -> Microbatches:
    if isinstance(batch, Iterator):
        pairs = []
        for k in range(count):
            try:
                drawn = next(batch)
            except StopIteration:
                raise ValueError(f"the iterator ended after {k} of {count} microbatches") from None
            except Exception as error:
                problem = f"the iterator failed at microbatch {k}: {type(error).__name__}: {one_line(error)}"
                raise ValueError(problem) from error
            problem = f"microbatch {k} of the iterator is a {type(drawn).__name__}, not a pair (inputs, targets)"
            pairs.append(_inputs_and_targets(drawn, problem))
    else:
        problem = f"a batch is a pair (inputs, targets), or an iterator of such pairs, got {type(batch).__name__}"
        if isinstance(batch, Iterable) and not isinstance(batch, torch.Tensor | Mapping | str):
            problem += ": give iter(...) of it"
        inputs, targets = _inputs_and_targets(batch, problem)
        lengths = sorted(
            {len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        )
        if len(lengths) > 1:
            raise ValueError(
                f"the tensors of a batch have {' and '.join(map(str, lengths))} samples: give equal numbers, or an "
                "iterator of microbatches"
            )
        _refuse_other_samples(batch, lengths)
        pairs = list(zip(_split_tensors(inputs, count), _split_tensors(targets, count), strict=True))
    on_device = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), pairs)
    return Microbatches([inputs for inputs, _ in on_device], [targets for _, targets in on_device])


def _inputs_and_targets(value: Any, problem: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(problem)
    return value[0], value[1]


def _refuse_other_samples(batch: Any, num_samples: Sequence[int]) -> None:
    """Refuse lists, arrays of other libraries than torch, and objects that contain data of each sample.

    Every microbatch would get all elements, because only tensors are split.
    """

    def is_column(node: Any) -> bool:
        # A tuple of numbers may be a size; torch's `default_collate` makes tuples of strings.
        kinds: Any = Constant if isinstance(node, list) else str if isinstance(node, tuple) else ()
        return kinds != () and len(node) in num_samples and all(isinstance(each, kinds) for each in node)

    def has_samples(value: Any) -> bool:
        with suppress(TypeError):  # an array without dimensions has no length
            return isinstance(value, Sized) and not isinstance(value, str | bytes) and len(value) in num_samples
        return False

    for leaf in pytree.tree_leaves(batch, is_leaf=is_column):
        if isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, Mapping) and has_samples(leaf):
            raise ValueError(
                f"a batch contains a {type(leaf).__name__} of {len(leaf)}, which is not split: give a tensor, or "
                "an iterator of microbatches"
            )
        inside = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
        data = [value for value in inside.values() if is_column(value) or hasattr(value, "__array__")]
        if any(map(has_samples, data)):
            raise ValueError(
                f"a batch contains a {type(leaf).__name__}, which is not split: give a dict of its tensors, or an "
                "iterator of microbatches"
            )


def _split_tensors(value: Any, count: int) -> list[Any]:
    """Cut every tensor inside `value` along its first dimension into `count` equal parts."""
    leaves, structure = pytree.tree_flatten(value)
    columns = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            columns.append([leaf] * count)
        elif leaf.dim() == 0:
            raise ValueError(
                "a tensor of the batch has no dimension to split: give a number, or an iterator of microbatches"
            )
        elif len(leaf) % count or not len(leaf):
            raise ValueError(f"a batch of {len(leaf)} samples does not divide into {count} microbatches")
        else:
            columns.append(list(leaf.chunk(count)))
    return [pytree.tree_unflatten([column[k] for column in columns], structure) for k in range(count)]


def sizes_of(inputs: list[Any]) -> list[MicrobatchSize]:
    """Return the size of each microbatch: the lengths of the microbatch's sequences.

    If the inputs of a microbatch contain `cu_seqlens`, the sequence lengths are computed from `cu_seqlens`, otherwise
    from the shape of the largest input. If the largest input has several dimensions, the size of its first dimension is
    the number of sequences.
    """
    sizes = []
    for value in inputs:
        packed = size_of(value) if isinstance(value, Mapping) and "cu_seqlens" in value else None
        largest = max(StageMessage.of(value).tensors, key=torch.numel)
        number = len(largest) if largest.dim() > 1 else 1
        sizes.append(packed or MicrobatchSize.of([largest.numel() // max(1, number)] * number))
    return sizes


def common_form(inputs: list[Any]) -> tuple[MessageSpec, bool]:
    """Return the `MessageSpec` of the first microbatch's inputs, and whether inputs of microbatches differ in shape.

    Raises:
        ValueError: the inputs of two microbatches differ in structure or type.
    """
    forms = [StageMessage.of(value).spec for value in inputs]
    for microbatch, form in enumerate(forms):
        if not form.has_form_of(forms[0], shapes_vary=True):
            raise ValueError(
                f"the inputs of microbatch {microbatch} are {form}, those of microbatch 0 are {forms[0]}: "
                "all microbatches of a step need the same structure and types"
            )
    return forms[0], not all(form.has_form_of(forms[0]) for form in forms)
