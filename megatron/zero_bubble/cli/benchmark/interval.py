"""How far a measured ratio can be trusted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median, quantiles

_RESAMPLES = 4000
_SEED = 20


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the median of `values`, one a round, from rounds drawn anew with replacement.

    The percentile bootstrap (Efron 1979). None for fewer than three rounds, which say nothing about themselves.
    """
    if len(values) < 3:
        return None
    draw = random.Random(_SEED)
    medians = [median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    cuts = quantiles(medians, n=40, method="inclusive")
    return cuts[0], cuts[-1]
