"""Fits curves to measured times and memory of operations, as functions of the size of a microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np

from megatron.zero_bubble.runtime.least_squares import nonnegative_least_squares
from megatron.zero_bubble.runtime.pair_times import outside_of_pairs
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import OpKind, Placement, StageCosts
from megatron.zero_bubble.schedule.analysis import by_result
from megatron.zero_bubble.schedule.kinds import KINDS, TIMES
from megatron.zero_bubble.schedule.sized_costs import Curve, MicrobatchSize, SizedCosts

_MEMORY = {OpKind.F: "memory_f", OpKind.B: "memory_b", OpKind.W: "memory_w", OpKind.R: "memory_r"}
_MOST_SAMPLES = 128
"""Largest number of samples of a stage's kind of operation that a rank contributes to a fit; a job may have thousands
of ranks, each of which gets the samples of all others."""
_BETTER = 0.98
"""Ratio of residuals below which a fitted curve with more terms replaces a curve with fewer terms."""


class _Sample(NamedTuple):
    size: MicrobatchSize
    milliseconds: float
    memory_change: float | None
    """Change of memory in bytes; None if memory was not measured."""
    inside: float | None
    """Temporary memory of the operation in bytes; None if memory was not measured."""


_Samples = dict[tuple[int, OpKind], list[_Sample]]
"""(stage, kind of operation) -> the measured operations."""
_Points = list[tuple[MicrobatchSize, float]]
"""The points to which a curve is fitted: (size of a microbatch, measured time or memory of an operation)."""


class SizeProfile:
    """The measured operations of a rank, each with the size of its microbatch.

    Args:
        placement: assigns stages to ranks.
        rank: this process's pipeline rank.
    """

    def __init__(self, placement: Placement, rank: int) -> None:
        self._placement, self._rank = placement, rank
        self._sizes: dict[int, tuple[Sequence[MicrobatchSize], Sequence[int]]] = {}
        self._samples: _Samples = defaultdict(list)

    def note(self, step: int, sizes: Sequence[MicrobatchSize], groups: Sequence[int] = ()) -> None:
        """Record the sizes of a step's microbatches, in the order of the schedule, and the schedule's `groups`."""
        self._sizes[step] = sizes, groups

    def collect(self, step: int, ops: Sequence[MeasuredOp]) -> None:
        """Add the operations of a step outside of pairs, if the sizes of the step's microbatches were recorded.

        Of stages that restore their layers in several groups, only the times of F are added: the B of such a stage also
        computes parts of R and W, and F and R keep a part of the activations.
        """
        sizes, groups = self._sizes.pop(step, ((), ()))
        if not sizes:
            return
        restored = {(run.op.chunk, run.op.microbatch): run.memory_change for run in ops if run.op.kind is OpKind.R}
        for measured in outside_of_pairs(ops):
            kind, microbatch, chunk = measured.op
            if not KINDS[kind].time:
                continue
            memory_change: float | None = measured.memory_change
            inside = None if memory_change is None else measured.inside
            if kind is OpKind.F and memory_change is not None:
                # The sum for F and R is the memory of an F that keeps all activations.
                memory_change += restored.get((chunk, microbatch)) or 0
            stage = self._placement.stage_of(self._rank, chunk)
            if groups and groups[stage] > 1:
                if kind is not OpKind.F:
                    continue
                memory_change = inside = None
            milliseconds = (measured.end - measured.start) * 1000.0
            self._samples[stage, kind].append(_Sample(sizes[microbatch], milliseconds, memory_change, inside))

    def fit(self, usual: StageCosts, gather: Callable[[_Samples], list[_Samples]]) -> SizedCosts | None:
        """Fit curves to the samples of all ranks; a collective call of these ranks, with the same result on each rank.

        Args:
            usual: the costs of a microbatch of mean size, from which costs without samples are derived.
            gather: returns the samples of all ranks.

        Returns:
            The fitted costs, or None if no rank has samples.
        """
        together: _Samples = defaultdict(list)
        for samples in gather({key: _thinned(values) for key, values in self._samples.items()}):
            for key, values in samples.items():
                together[key] += values
        return sized_costs(together, usual)


def _thinned(samples: list[_Sample]) -> list[_Sample]:
    """Return at most `_MOST_SAMPLES` samples, with sizes from the smallest to the largest in equal shares."""
    count = len(samples)
    if count <= _MOST_SAMPLES:
        return samples
    in_order = sorted(samples, key=lambda sample: sample.size.tokens)
    return [in_order[number * (count - 1) // (_MOST_SAMPLES - 1)] for number in range(_MOST_SAMPLES)]


def sized_costs(samples: Mapping[tuple[int, OpKind], Sequence[_Sample]], usual: StageCosts) -> SizedCosts | None:
    """Fit a curve for each stage and kind of operation; if B and W have no samples, each gets half of the curve of BW.

    A cost for which a stage has no samples is proportional to the number of tokens.
    """
    if not samples:
        return None
    mean_tokens = fmean(sample.size.tokens for values in samples.values() for sample in values)
    curves: dict[str, list[Curve]] = {
        name: [Curve(0.0, value / mean_tokens, 0.0) for value in getattr(usual, name)]
        for name in (*TIMES, *_MEMORY.values())
    }
    times = {kind: name for name, kind in TIMES.items()}
    for stage in range(usual.num_stages):
        for field, names in (("milliseconds", times), ("memory_change", _MEMORY)):
            measured = {kind: _points(values, field) for (of, kind), values in samples.items() if of == stage}
            for kind, curve in _curves_by_result(measured).items():
                if kind in names:
                    curves[names[kind]][stage] = curve
    return SizedCosts(
        usual, {name: tuple(values) for name, values in curves.items()}, _inside(samples, usual.num_stages)
    )


def _inside(samples: Mapping[tuple[int, OpKind], Sequence[_Sample]], num_stages: int) -> tuple[Curve, ...]:
    """Fit a curve to the temporary memory of each stage's operations.

    The curve of a stage is fitted to one kind of operation: the kind that needs the most temporary memory.
    """
    curves = [Curve(0.0, 0.0, 0.0)] * num_stages
    most = [0.0] * num_stages
    for (stage, _), values in samples.items():
        measured = _points(values, "inside")
        if measured and (largest := max(inside for _, inside in measured)) > most[stage]:
            curves[stage], most[stage] = _fit(measured), largest
    return tuple(curves)


def _points(samples: Iterable[_Sample], field: str) -> _Points:
    return [(each.size, getattr(each, field)) for each in samples if getattr(each, field) is not None]


def _curves_by_result(samples: Mapping[OpKind, _Points]) -> dict[OpKind, Curve]:
    """Fit a curve for each kind of operation; if B and W have no samples, each gets half of the curve of BW."""
    fitted = {kind: _fit(values) for kind, values in samples.items() if values}
    parts = [by_result({kind: curve[part] for kind, curve in fitted.items()}) for part in range(len(Curve._fields))]
    return {kind: Curve(*(part[kind] for part in parts)) for kind in parts[0]}


def _fit(samples: _Points) -> Curve:
    """Return the least-squares curve whose coefficients all have the same sign.

    A curve with fewer terms is preferred if it fits the samples nearly as well as a curve with more terms.
    """
    sign = -1.0 if fmean(value for _, value in samples) < 0 else 1.0
    features = np.array([(1.0, size.tokens, size.squares) for size, _ in samples])
    values = np.array([sign * value for _, value in samples])
    scale = np.maximum(features.mean(0), 1.0)
    best, least = Curve(0.0, 0.0, 0.0), float(np.square(values).sum())
    for count in (1, 2, 3):
        for parts in map(list, combinations((1, 2, 0), count)):
            columns = (features / scale)[:, parts]
            coefficients = nonnegative_least_squares(columns, values)
            residual = float(np.square(columns @ coefficients - values).sum())
            if residual < least * _BETTER:
                whole = np.zeros(3)
                whole[parts] = coefficients / scale[parts]
                best, least = Curve(*(sign * whole).tolist()), residual
    return best
