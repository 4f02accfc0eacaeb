"""Divides a model's layers among stages so that the largest load of a stage is minimal.

The weight of a layer is a number that measures the layer's load, for example the computing time of the layer. The load
of a stage is the sum of the weights of the stage's layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

Boundaries = tuple[int, ...]
"""Index of the first layer of every stage, followed by the model's number of layers."""


def balanced(weights: Sequence[float], num_parts: int) -> Boundaries:
    """Split `weights` into consecutive non-empty parts so that `max(sum(part) for part in parts)` is minimal.

    Ties are broken by the smallest `sum(sum(part) ** 2 for part in parts)`, and then by the smallest
    `sum(len(part) ** 2 for part in parts)`.
    """
    before = list(accumulate(weights, initial=0))
    smallest = [math.inf, *before[1:]]
    """`smallest[n]` is the smallest limit on the sum of each part that a partition of the first n layers can satisfy.

    After k passes of the loop below, `smallest` describes partitions into k + 1 parts.
    """
    for _ in range(num_parts - 1):
        smallest = [
            min((max(smallest[first], total - before[first]) for first in range(end)), default=math.inf)
            for end, total in enumerate(before)
        ]
    return _even_boundaries(before, num_parts, smallest[-1])


def _even_boundaries(before: Sequence[float], num_parts: int, limit: float) -> Boundaries:
    """Split weights into `num_parts` consecutive non-empty parts so that the sum of every part is at most `limit`.

    Of all partitions within `limit`, return the partition with the smallest `sum(sum(part) ** 2 for part in parts)`.
    Ties are broken by the smallest `sum(len(part) ** 2 for part in parts)`.

    Args:
        before: cumulative sums of the weights; the first sum is 0.
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
    """Return the user's boundaries between stages, preceded by 0 and followed by `num_layers`.

    Raises:
        ValueError: there are not `num_stages - 1` boundaries, or a stage gets no layer.
    """
    complete = (0, *boundaries, num_layers)
    if len(boundaries) != num_stages - 1 or any(first >= end for first, end in pairwise(complete)):
        raise ValueError(
            f"partition={list(boundaries)}: {num_layers} layers on {num_stages} stages need {num_stages - 1} rising "
            f"boundaries from 1 to {num_layers - 1}, the first layer of every stage after the first"
        )
    return complete


def matching(pattern: str, class_names: Sequence[str]) -> list[int]:
    """Return one number for each class name: 1 if the regular expression `pattern` matches, ignoring case, otherwise 0.

    Raises:
        ValueError: `pattern` is not a valid regular expression, or matches no class name.
    """
    try:
        weights = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in class_names]
    except re.error as error:
        raise ValueError(f"partition='type:{pattern}': not a regular expression: {error}") from None
    if not any(weights):
        known = ", ".join(sorted(set(class_names)))
        raise ValueError(f"partition='type:{pattern}' matches no layer; their classes are {known}")
    return weights
