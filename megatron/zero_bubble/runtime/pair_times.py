"""Measures how much time a forward and a backward save if they run as one operation.

If a forward and a backward run as one operation (a *pair*), exchanges of tokens between experts can overlap with
computation on a GPU, because a GPU runs exchanges and computation on separate streams. On a CPU, exchanges of tokens
take processor time, and therefore cannot overlap with computation. The saved time is the sum of the separate durations
of the forward and the backward, minus the duration of the pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import OpKind
from megatron.zero_bubble.schedule.kinds import BACKWARDS, KINDS
from megatron.zero_bubble.schedule.pairs import pairs

_LEAST_GAIN = 0.02
"""The time that a pair saves counts as zero below this fraction of the time that F and B take as two operations."""

_Times = Mapping[tuple[int, OpKind], float]
"""(model chunk, kind of operation) -> milliseconds of one operation."""


class PairTime(NamedTuple):
    """Durations of the pairs of F and B that contain an operation of a given chunk.

    Pairs are of the same type if the chunk of F, the chunk of B and the kind of backward are the same. `paired` is
    the usual duration of a pair, summed over the types of pairs. `separate` is the usual duration of F and B as two
    operations, summed over the types of pairs. Both durations are in milliseconds. `overlap` is the time for which
    token exchanges overlap with computation, as a fraction of the longest possible overlap, averaged over the types of
    pairs.
    """

    overlap: float = 0.0
    paired: float = 0.0
    separate: float = 0.0


NO_PAIRS = PairTime()


def _overlap_share(separate: float, paired: float, exchanged: float) -> float:
    """Return the overlap of token exchanges and computation in a pair, as a share of the longest possible overlap."""
    overlap, most = separate - paired, min(exchanged, separate - exchanged)
    if most <= 0 or overlap < _LEAST_GAIN * separate:
        return 0.0
    return min(1.0, overlap / most)


def outside_of_pairs(ops: Sequence[MeasuredOp]) -> list[MeasuredOp]:
    """Return the operations of one step that a rank runs alone, not in a pair of a forward and a backward."""
    paired = {op for pair in pairs([measured.op for measured in ops]) for op in pair}
    return [measured for measured in ops if measured.op not in paired]


class PairTimes:
    """Collects the durations of the pairs of F and B that one rank runs, over several steps."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int, OpKind], list[float]] = defaultdict(list)
        """(chunk of the forward, chunk of the backward, kind of the backward) -> the milliseconds of each pair."""

    def add(self, ops: Sequence[MeasuredOp]) -> None:
        """Add the durations of all pairs of F and B in one step."""
        times = {measured.op: measured.end - measured.start for measured in ops}
        for forward, backward in pairs([measured.op for measured in ops]):
            self._samples[forward.chunk, backward.chunk, backward.kind].append(times[backward] * 1000.0)

    def of_chunk(
        self, chunk: int, times: _Times, exchanged: _Times, center: Callable[[Sequence[float]], float]
    ) -> PairTime:
        """Compare the durations of the pairs of a chunk with the durations of the same operations run separately.

        Args:
            times: times of the operations that ran outside of pairs.
            exchanged: the parts of `times` in which experts exchange tokens.
            center: computes one time from several samples, for example the median.
        """
        shares, paired, separate = [], 0.0, 0.0
        for (forward, backward, kind), samples in self._samples.items():
            parts = [(forward, OpKind.F), *_alone(backward, kind, times)]
            if chunk not in (forward, backward) or len(parts) == 1 or parts[0] not in times:
                continue
            sum_separate, pair = sum(times[part] for part in parts), center(samples)
            shares.append(_overlap_share(sum_separate, pair, sum(exchanged.get(part, 0.0) for part in parts)))
            paired, separate = paired + pair, separate + sum_separate
        return PairTime(sum(shares) / len(shares), paired, separate) if shares else NO_PAIRS


def _alone(chunk: int, kind: OpKind, times: _Times) -> list[tuple[int, OpKind]]:
    """List the operations, measured outside of pairs, that compute the same gradients as an operation of kind `kind`.

    The list is empty if one of these operations was not measured outside of pairs.
    """
    results = KINDS[kind].makes
    same = [(chunk, alone) for alone in BACKWARDS if KINDS[alone].makes == results and (chunk, alone) in times]
    return same[:1] or [(chunk, result) for result in results if all((chunk, each) in times for each in results)]


def duration_ratio(measured: Sequence[PairTime]) -> float | None:
    """Return the ratio of the time of pairs to the time of the same operations run separately; None without pairs."""
    separate = sum(each.separate for each in measured)
    return sum(each.paired for each in measured) / separate if separate else None
