"""Records what a rank asks of torch.distributed: the group, the operation and its size, in the order of the calls."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.zero_bubble.runtime.executor import Executor

COLLECTIVES = (
    *("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_into_tensor", "_all_gather_base"),
    *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single"),
    *("reduce", "gather", "scatter", "all_gather_object"),
)
Call = tuple[tuple[int, ...], str, tuple[int, ...]]
"""(global ranks of the group, collective, elements of each tensor)."""
IN_VALIDATION = " in VALIDATE"
"""Suffix of the name of a collective that is started while the schedule validates a step."""


@contextmanager
def recorded_collectives() -> Iterator[list[Call]]:
    """Every collective that this process starts by one of torch.distributed's functions, from whatever module.

    megatron-core keeps some of them under names of its own.
    """
    calls: list[Call] = []
    replacements = {original: _recording(original, calls) for original in map(vars(c10d).get, COLLECTIVES) if original}
    _replace_everywhere(replacements)
    try:
        yield calls
    finally:
        _replace_everywhere({recording: original for original, recording in replacements.items()})


def _replace_everywhere(replacements: dict[Any, Any]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch.distributed", "megatron.")):
            for attribute, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in replacements:
                    setattr(module, attribute, replacements[value])


def _recording(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        ranks = tuple(dist.get_process_group_ranks(arguments.get("group") or dist.group.WORLD))
        sizes = tuple(value.numel() for value in arguments.values() if isinstance(value, torch.Tensor))
        calls.append((ranks, function.__name__ + IN_VALIDATION * _is_validating(), sizes))
        return function(*args, **kwargs)

    return record


def _is_validating() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Executor._validate.__code__:
        frame = frame.f_back
    return frame is not None


def disagreements(calls_of_ranks: list[list[Call]]) -> list[str]:
    """Groups whose members do not call the same collectives, of the same sizes, in the same order."""
    found = []
    for group in sorted({ranks for calls in calls_of_ranks for ranks, _, _ in calls}):
        first, *others = ([call[1:] for call in calls_of_ranks[rank] if call[0] == group] for rank in group)
        for rank, other in zip(group[1:], others, strict=True):
            if other != first:
                place = next(i for i, (a, b) in enumerate(zip_longest(first, other)) if a != b)
                found.append(f"group {group}: ranks {group[0]} and {rank} differ at call {place}")
    return found
