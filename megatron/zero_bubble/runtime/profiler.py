"""Computes `StageCosts` from the times and the memory that a run has measured."""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.pair_times import NO_PAIRS, PairTime, PairTimes, duration_ratio, outside_of_pairs
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import OpKind, Placement, StageCosts
from megatron.zero_bubble.schedule.analysis import by_result, fused_saving
from megatron.zero_bubble.schedule.kinds import BACKWARDS, COPIES, KINDS, TIMES

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class ChunkCosts:
    """Measurements of one stage on one rank; times in milliseconds, memory in bytes."""

    stage: int
    times: Mapping[OpKind, float]
    """Kind of operation -> usual time; the operations on a rank's vocabulary shard belong to the rank's first chunk."""
    memory: Mapping[OpKind, float]
    """Kind of operation -> usual change of memory; for F, the change if F keeps all activations."""
    noise: float
    """Interquartile range / (2 * median) of the times of a kind of operation: the largest value (see `_MATTERS`)."""
    inside: int = 0
    """Largest temporary memory of an operation (see `MeasuredOp.inside`)."""
    exchanged: Mapping[OpKind, float] = field(default_factory=dict)
    """Kind of operation -> time for which its token exchanges overlap with computation in pairs of F and B."""
    pairs: PairTime = NO_PAIRS
    num_blocks: int = 0
    """Number of recomputed blocks of layers; 0 if unknown."""
    copied: Mapping[OpKind, float] = field(default_factory=dict)
    """Kind of copy (D to the host, H back to the device) -> usual time of a copy; empty without offload."""
    released: float = 0
    """Bytes of device memory that D frees after the copy of activations to the host."""
    outside: int = 0
    """Bytes that layers outside of the recomputed blocks hold between B and W."""


_MATTERS = 0.02
"""Kinds of operations that take less than this share of the longest operation's time do not count for `noise`."""


class Profiler:
    """Collects the measured operations of one rank over several steps, and computes the costs of the rank's chunks."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self._placement = placement
        self._rank = rank
        self._times: dict[tuple[int, OpKind], list[float]] = defaultdict(list)
        self._memory: dict[tuple[int, OpKind], list[int]] = defaultdict(list)
        self._dropped: dict[int, list[int]] = defaultdict(list)
        """Chunk -> change of memory by each F whose activations were recomputed."""
        self._inside: dict[int, int] = defaultdict(int)
        self._exchanged: dict[tuple[int, OpKind], list[float]] = defaultdict(list)
        self._pairs = PairTimes()
        self._within: dict[tuple[int, OpKind], list[float]] = defaultdict(list)
        """(chunk, R or W) -> times of the recomputations or weight gradients that ran within B."""

    def add(self, ops: Sequence[MeasuredOp]) -> None:
        """Add the operations of one step; for a forward and a backward that ran as a pair, add only the pair's time."""
        self._pairs.add(ops)
        recomputed = {(run.op.chunk, run.op.microbatch) for run in ops if run.op.kind is OpKind.R}
        for measured in outside_of_pairs(ops):
            kind, microbatch, chunk = measured.op
            if kind is OpKind.F or kind in BACKWARDS:
                self._exchanged[chunk, kind].append(measured.exchanged * 1000.0)
            for part, seconds in measured.within:
                self._within[chunk, part].append(seconds * 1000.0)
            own = measured.end - measured.start - sum(seconds for _, seconds in measured.within)
            self._times[chunk, kind].append(own * 1000.0)
            if measured.memory_change is not None:
                drops = kind is OpKind.F and (chunk, microbatch) in recomputed
                (self._dropped[chunk] if drops else self._memory[chunk, kind]).append(measured.memory_change)
                self._inside[chunk] = max(self._inside[chunk], measured.inside)

    def costs(
        self,
        center: Callable[[Sequence[float]], float] = statistics.median,
        recomputation: RecomputationStore | None = None,
        offload: OffloadStore | None = None,
    ) -> list[ChunkCosts]:
        """Return the costs of this rank's chunks.

        Time that B spends on recomputation and on weight gradients counts as time of R and W.

        Args:
            center: computes one time from several samples. An outlier, such as the first step, hardly changes the
                median. The mean is used if microbatches differ in length, and to compare a plan with measured steps.
            recomputation: the store that has counted the recomputed blocks of layers.
            offload: the store that has measured the copies to and from the host.
        """
        chunk_costs = []
        recomputation = recomputation or RecomputationStore()
        alone, exchanged, within = (
            {key: center(values) for key, values in samples.items()}
            for samples in (self._times, self._exchanged, self._within)
        )
        for chunk in range(self._placement.num_chunks):
            in_pairs = self._pairs.of_chunk(chunk, alone, exchanged, center)
            kinds = [kind for kind, facts in KINDS.items() if facts.time and (chunk, kind) in alone]
            times = {kind: alone[chunk, kind] + within.get((chunk, kind), 0.0) for kind in kinds}
            matter = [kind for kind in kinds if times[kind] >= _MATTERS * max(times.values())]
            seconds = {kind: offload.times(kind, chunk) for kind in COPIES} if offload is not None else {}
            chunk_costs.append(
                ChunkCosts(
                    stage=self._placement.stage_of(self._rank, chunk),
                    times=times,
                    memory={kind: self._memory_of(chunk, kind, center) for kind in kinds},
                    noise=max(_relative_spread(self._times[chunk, kind]) for kind in matter),
                    inside=self._inside[chunk],
                    exchanged={
                        kind: exchanged[chunk, kind] * in_pairs.overlap for kind in kinds if (chunk, kind) in exchanged
                    },
                    pairs=in_pairs,
                    num_blocks=recomputation.num_blocks.get(chunk, 0),
                    copied={kind: 1000.0 * center(values) for kind, values in seconds.items() if values},
                    released=-self._memory_of(chunk, OpKind.D, center),
                    outside=recomputation.bytes_outside.get(chunk, 0),
                )
            )
        return chunk_costs

    def _memory_of(self, chunk: int, kind: OpKind, center: Callable[[Sequence[float]], float]) -> float:
        """Return the usual change of memory by operations of `kind`; for F, include the activations that R restores."""
        changes = self._memory.get((chunk, kind))
        if changes:
            return center(changes)
        if kind is OpKind.F and self._dropped[chunk]:
            return center(self._dropped[chunk]) + self._memory_of(chunk, OpKind.R, center)
        return 0


def _relative_spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle > 0 else 0.0


class MeasuredCosts(NamedTuple):
    """The combined measurements of all ranks of a job; times in milliseconds, memory in bytes."""

    costs: StageCosts
    noise: float
    inside: tuple[int, ...]
    """For each stage, the largest temporary memory of an operation (see `ChunkCosts.inside`)."""
    ratio_of_pairs: float | None
    """Time of F and B as a pair, divided by the time of F and B one after the other; None without measured pairs."""


def combine_costs(
    placement: Placement, gathered: Sequence[tuple[Sequence[ChunkCosts], Mapping[int, float]]]
) -> MeasuredCosts:
    """Compute the costs of all stages from the measurements of all ranks.

    The time of an operation is the maximum over the data- and tensor-parallel replicas of a stage, because the pipeline
    waits for the slowest replica. The memory of a stage after F, after B and after W is also the maximum over replicas.

    Args:
        gathered: for each rank, the measurements of the rank's chunks, and a mapping that contains the message times of
            the rank: stage s -> milliseconds that a message takes between stages s and s + 1.
    """
    chunks = [chunk for chunks_of_rank, _ in gathered for chunk in chunks_of_rank]
    stages = [[chunk for chunk in chunks if chunk.stage == stage] for stage in range(placement.num_stages)]

    def most(value: Callable[[ChunkCosts], _Number]) -> tuple[_Number, ...]:
        return tuple(max(map(value, replicas)) for replicas in stages)

    def memory_after(*kinds: OpKind) -> tuple[float, ...]:
        # The changes are summed for each replica, because the replica that keeps most in F releases most in B.
        return most(lambda chunk: sum(by_result(chunk.memory).get(kind, 0.0) for kind in kinds))

    def exchanged(*kinds: OpKind) -> tuple[float, ...]:
        # The shortest time over the replicas of a stage: longer times include waits for other replicas.
        return tuple(min(sum(each.exchanged.get(kind, 0.0) for kind in kinds) for each in stage) for stage in stages)

    def time_of(kind: OpKind) -> tuple[float, ...]:
        # R is missing without recomputation, and operations on shards are missing without vocabulary shards.
        return most(lambda chunk: by_result(chunk.times).get(kind, 0.0))

    def copy_time(kind: OpKind) -> tuple[float, ...]:
        return most(lambda chunk: chunk.copied.get(kind, 0.0))

    times = {name: time_of(kind) for name, kind in TIMES.items()}
    fused = most(lambda chunk: chunk.times.get(OpKind.BW, 0.0))
    after_f = memory_after(OpKind.F)
    after_b = memory_after(OpKind.F, OpKind.B)
    after_w = memory_after(OpKind.F, OpKind.B, OpKind.W)
    # T (the weight gradient of a vocabulary shard) frees the memory that S (the shard's output layer) keeps. A part of
    # this memory is freed between S and T, in a collective, where memory is not measured.
    softmax = [max(0.0, change) for change in memory_after(OpKind.S)]
    costs = StageCosts(
        **times,
        saved_bw=tuple(map(fused_saving, fused, times["time_b"], times["time_w"])),
        all_to_all_f=tuple(map(min, exchanged(OpKind.F), times["time_f"])),
        all_to_all_b=tuple(map(min, exchanged(OpKind.B, OpKind.BW), times["time_b"])),
        time_comm=tuple(max(own.get(edge, 0.0) for _, own in gathered) for edge in range(placement.num_stages - 1)),
        memory_f=after_f,
        memory_b=tuple(map(operator.sub, after_b, after_f)),
        memory_w=tuple(map(operator.sub, after_w, after_b)),
        memory_r=tuple(max(0.0, restored) for restored in memory_after(OpKind.R)),
        **{KINDS[kind].link: copy_time(kind) for kind in COPIES},
        memory_d=tuple(max(0.0, min(replica.released for replica in replicas)) for replicas in stages),
        num_blocks=most(lambda chunk: chunk.num_blocks),
        memory_outside=most(lambda chunk: chunk.outside),
        memory_s=tuple(softmax),
        memory_t=tuple(-change for change in softmax),
    )
    noise, ratio = max(chunk.noise for chunk in chunks), duration_ratio([chunk.pairs for chunk in chunks])
    return MeasuredCosts(costs, noise, most(lambda chunk: chunk.inside), ratio)
