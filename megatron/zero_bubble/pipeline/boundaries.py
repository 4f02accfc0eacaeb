"""Divides a model's layers among stages so that the largest load of a stage is minimal.

The weight of a layer is a number that measures the layer's load, such as its time. The load of a stage is the sum of
the weights of the stage's layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

Boundaries = tuple[int, ...]
"""The first layer of every stage, followed by the number of layers."""


def balanced(weights: Sequence[float], num_parts: int) -> Boundaries:
    """Split `weights` into consecutive non-empty parts so that the largest sum of a part is as small as possible.

    Ties are broken by the smallest total of the parts' squared sums, and then by the smallest total of the parts'
    squared lengths.
    """
    before = list(accumulate(weights, initial=0))
    smallest = [math.inf, *before[1:]]
    """`smallest[n]` is the minimum, over all partitions of the first n layers, of the largest sum of a part.

    After k passes of the loop below, `smallest` describes partitions into k + 1 parts.
    """
    for _ in range(num_parts - 1):
        smallest = [
            min((max(smallest[first], total - before[first]) for first in range(end)), default=math.inf)
            for end, total in enumerate(before)
        ]
    return _even_boundaries(before, num_parts, smallest[-1])


def _even_boundaries(before: Sequence[float], num_parts: int, limit: float) -> Boundaries:
    """Return the partition with the smallest total of the parts' squared sums in which no part's sum exceeds `limit`.

    Ties are broken by the smallest total of the parts' squared lengths.
    """
    num_layers = len(before) - 1
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0, 0, 0)}]
    """`best[k][n]` describes the best partition of the first n layers into k parts by three numbers: the total of
    the parts' squared sums, the total of the parts' squared lengths, and the index of the last part's first layer."""
    for part in range(num_parts):
        ends: dict[int, tuple[float, float, int]] = {}
        for first, (squares, lengths, _) in best[-1].items():
            for end in range(first + 1, num_layers - (num_parts - part - 1) + 1):
                weight = before[end] - before[first]
                if weight > limit:
                    break
                candidate = (squares + weight**2, lengths + (end - first) ** 2, first)
                if end not in ends or candidate < ends[end]:
                    ends[end] = candidate
        best.append(ends)
    cuts = [num_layers]
    for ends in reversed(best[1:]):
        cuts.append(ends[cuts[-1]][2])
    return tuple(reversed(cuts))


def given(boundaries: Sequence[int], num_layers: int, num_stages: int) -> Boundaries:
    """Return a user's boundaries between stages, completed by the first boundary 0 and the last boundary `num_layers`.

    Raises:
        ValueError: the boundaries do not leave at least one layer to each stage.
    """
    complete = (0, *boundaries, num_layers)
    if len(boundaries) != num_stages - 1 or any(first >= end for first, end in pairwise(complete)):
        raise ValueError(
            f"partition={list(boundaries)}: {num_layers} layers on {num_stages} stages need {num_stages - 1} rising "
            f"boundaries from 1 to {num_layers - 1}, the first layer of every stage after the first"
        )
    return complete


def matching(pattern: str, class_names: Sequence[str]) -> list[int]:
    """Return 1 for each class name that the regular expression matches, ignoring case, and 0 for each other class name.

    Raises:
        ValueError: `pattern` is not a regular expression, or matches no class.
    """
    try:
        weights = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in class_names]
    except re.error as error:
        raise ValueError(f"partition='type:{pattern}': not a regular expression: {error}") from None
    if not any(weights):
        known = ", ".join(sorted(set(class_names)))
        raise ValueError(f"partition='type:{pattern}' matches no layer; their classes are {known}")
    return weights
