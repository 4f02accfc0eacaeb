"""Turns the measured times and memory of a run into `StageCosts`."""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.pair_times import NO_PAIRS, PairTime, PairTimes, duration_ratio
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import OpKind, Placement, StageCosts
from megatron.zero_bubble.schedule.analysis import by_result, fused_saving
from megatron.zero_bubble.schedule.kinds import BACKWARDS, COPIES, KINDS, TIMES
from megatron.zero_bubble.schedule.pairs import pairs


@dataclass(frozen=True)
class ChunkCosts:
    """Measurements of one stage on one rank; times in milliseconds, memory in bytes."""

    stage: int
    times: Mapping[OpKind, float]
    """Kind of operation -> usual time.

    The kinds are F, B and W, or F and BW if the backward is fused. `times` also contains R if activations were
    recomputed and, for the first chunk of a rank, the operations on the rank's vocabulary shard.
    """
    memory: Mapping[OpKind, float]
    """Kind -> usual change of memory; for F, the change if F keeps all activations, as in `StageCosts.memory_f`."""
    noise: float
    """Largest relative spread of the times that are not negligible: interquartile range / (2 * median)."""
    inside: int = 0
    """Largest temporary memory of an operation: its peak beyond the memory in use before and after the operation."""
    exchanged: Mapping[OpKind, float] = field(default_factory=dict)
    """Kind of operation -> milliseconds of its token exchanges that overlap with computation if F and B run as a pair.

    The kinds are F and B, or F and BW if the backward is fused. All values are 0 if no pairs of F and B were measured.
    """
    pairs: PairTime = NO_PAIRS
    num_blocks: int = 0
    """Number of recomputed blocks of layers; 0 if unknown."""
    copied: Mapping[OpKind, float] = field(default_factory=dict)
    """Kind of copy (D to the host, H back to the device) -> usual time of a copy; empty without offload."""
    released: float = 0
    """Bytes of device memory that D, the copy of activations to the host, releases."""
    outside: int = 0
    """Bytes that layers outside of the recomputed blocks hold between B and W."""


_MATTERS = 0.02
"""Kinds of operations that take less than this share of the longest operation's time do not count for `noise`."""


class Profiler:
    """Collects the measured operations of one rank over several steps, to compute the costs of the rank's chunks."""

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
        """Add the operations of one step; if a forward and a backward ran as a pair, add only the time of the pair."""
        self._pairs.add(ops)
        paired = {op for pair in pairs([measured.op for measured in ops]) for op in pair}
        recomputed = {(run.op.chunk, run.op.microbatch) for run in ops if run.op.kind is OpKind.R}
        for measured in ops:
            kind, microbatch, chunk = measured.op
            if measured.op in paired:
                continue
            if kind is OpKind.F or kind in BACKWARDS:
                self._exchanged[chunk, kind].append(measured.exchanged * 1000.0)
            for part, seconds in measured.within:
                self._within[chunk, part].append(seconds * 1000.0)
            own = measured.end - measured.start - sum(seconds for _, seconds in measured.within)
            self._times[chunk, kind].append(own * 1000.0)
            if measured.held is not None:
                drops = kind is OpKind.F and (chunk, microbatch) in recomputed
                (self._dropped[chunk] if drops else self._memory[chunk, kind]).append(measured.held)
                self._inside[chunk] = max(self._inside[chunk], measured.inside)

    def costs(
        self,
        center: Callable[[Sequence[float]], float] = statistics.median,
        recomputation: RecomputationStore | None = None,
        offload: OffloadStore | None = None,
    ) -> list[ChunkCosts]:
        """Return the costs of this rank's chunks.

        Recomputations and weight gradients that ran within B count as R and W.

        Args:
            center: computes one time from several samples. The median is hardly changed by an outlier, such as the
                first step. The mean is used if microbatches differ in length, and to compare a plan with measured
                steps.
            recomputation: the store that has counted the recomputed blocks of layers.
            offload: the store that has measured the copies to and from the host.
        """
        chunk_costs = []
        alone = {key: center(samples) for key, samples in self._times.items()}
        exchanged = {key: center(samples) for key, samples in self._exchanged.items()}
        for chunk in range(self._placement.num_chunks):
            in_pairs = self._pairs.of_chunk(chunk, alone, exchanged, center)
            kinds = [kind for kind, facts in KINDS.items() if facts.time and (chunk, kind) in self._times]
            samples = {kind: self._times[chunk, kind] for kind in kinds}
            times = {kind: center(values) for kind, values in samples.items()}
            for kind in times:
                times[kind] += center(self._within[chunk, kind]) if (chunk, kind) in self._within else 0.0
            matter = [kind for kind in kinds if times[kind] >= _MATTERS * max(times.values())]
            chunk_costs.append(
                ChunkCosts(
                    stage=self._placement.stage_of(self._rank, chunk),
                    times=times,
                    memory={kind: self._memory_of(chunk, kind, center) for kind in kinds},
                    noise=max(_relative_spread(samples[kind]) for kind in matter),
                    inside=self._inside[chunk],
                    exchanged={
                        kind: exchanged[chunk, kind] * in_pairs.hidden for kind in kinds if (chunk, kind) in exchanged
                    },
                    pairs=in_pairs,
                    num_blocks=recomputation.num_blocks.get(chunk, 0) if recomputation else 0,
                    copied={} if offload is None else _times_of_copies(offload, chunk, center),
                    released=-self._memory_of(chunk, OpKind.D, center),
                    outside=recomputation.bytes_outside.get(chunk, 0) if recomputation else 0,
                )
            )
        return chunk_costs

    def _memory_of(self, chunk: int, kind: OpKind, center: Callable[[Sequence[float]], float]) -> float:
        """Return the usual change of memory by a kind of operation.

        For F, `_memory_of` returns the change of memory by an F that keeps all activations. If every F drops
        activations, the returned change is the change by F plus the change by R.
        """
        kept = self._memory.get((chunk, kind))
        if kept:
            return center(kept)
        if kind is OpKind.F and self._dropped[chunk]:
            return center(self._dropped[chunk]) + self._memory_of(chunk, OpKind.R, center)
        return 0


def _times_of_copies(
    offload: OffloadStore, chunk: int, center: Callable[[Sequence[float]], float]
) -> dict[OpKind, float]:
    """Return the usual milliseconds of one copy of `chunk`, for copies to the host (D) and copies back (H)."""
    seconds = {kind: offload.times(kind, chunk) for kind in COPIES}
    return {kind: 1000.0 * center(times) for kind, times in seconds.items() if times}


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
    """For every stage, the largest temporary memory of an operation (see `ChunkCosts.inside`)."""
    ratio_of_pairs: float | None
    """Time of F and B as a pair, divided by the time of F and B one after the other; None without measured pairs."""


def gather_costs(placement: Placement, chunks: Sequence[ChunkCosts], edges: Mapping[int, float]) -> MeasuredCosts:
    """Gather the costs of all stages; a collective call of the whole job, with the same result on every rank.

    The times of a stage are maxima over its data- and tensor-parallel replicas, because the pipeline waits for the
    slowest replica. The memory of a stage after F, after B and after W is the maximum over the stage's replicas.
    """
    return combine_costs(placement, from_all_ranks((chunks, edges)))


def _exchange_times(stages: Sequence[Sequence[ChunkCosts]], *kinds: OpKind) -> tuple[float, ...]:
    """Return each stage's shortest token-exchange time over its replicas; longer times include waits for replicas."""
    return tuple(
        min(sum(replica.exchanged.get(kind, 0.0) for kind in kinds) for replica in replicas) for replicas in stages
    )


def combine_costs(
    placement: Placement, gathered: Sequence[tuple[Sequence[ChunkCosts], Mapping[int, float]]]
) -> MeasuredCosts:
    """Combine the measurements of all ranks, for `gather_costs`."""
    by_stage: dict[int, list[ChunkCosts]] = defaultdict(list)
    by_edge: dict[int, list[float]] = defaultdict(list)
    for chunks, edges in gathered:
        for chunk in chunks:
            by_stage[chunk.stage].append(chunk)
        for edge, milliseconds in edges.items():
            by_edge[edge].append(milliseconds)
    stages = [by_stage[stage] for stage in range(placement.num_stages)]
    times = [[by_result(chunk.times) for chunk in replicas] for replicas in stages]
    memory = [[by_result(chunk.memory) for chunk in replicas] for replicas in stages]

    def most(values: list[list[dict[OpKind, float]]], kind: OpKind) -> tuple[float, ...]:
        # R is missing without recomputation, and operations on shards are missing without vocabulary shards.
        return tuple(max(replica.get(kind, 0.0) for replica in replicas) for replicas in values)

    def held_after(*kinds: OpKind) -> tuple[float, ...]:
        # The changes are summed for each replica, because the replica that keeps most in F releases most in B.
        return tuple(max(sum(replica.get(kind, 0.0) for kind in kinds) for replica in replicas) for replicas in memory)

    kept = held_after(OpKind.F)
    waiting = held_after(OpKind.F, OpKind.B)
    left = held_after(OpKind.F, OpKind.B, OpKind.W)
    # T (the weight gradient of a vocabulary shard) frees the memory that S (the shard's output layer) keeps. A part of
    # this memory is freed between S and T, in a collective, where memory is not measured.
    softmax = [max(0.0, kept) for kept in held_after(OpKind.S)]
    by_name = {name: most(times, kind) for name, kind in TIMES.items()}
    fused = most([[dict(chunk.times) for chunk in replicas] for replicas in stages], OpKind.BW)
    costs = StageCosts(
        **by_name,
        saved_bw=tuple(map(fused_saving, fused, by_name["time_b"], by_name["time_w"])),
        all_to_all_f=tuple(map(min, _exchange_times(stages, OpKind.F), by_name["time_f"])),
        all_to_all_b=tuple(map(min, _exchange_times(stages, OpKind.B, OpKind.BW), by_name["time_b"])),
        time_comm=tuple(max(by_edge.get(edge, [0.0])) for edge in range(placement.num_stages - 1)),
        memory_f=kept,
        memory_b=tuple(map(operator.sub, waiting, kept)),
        memory_w=tuple(map(operator.sub, left, waiting)),
        memory_r=tuple(max(0.0, restored) for restored in most(memory, OpKind.R)),
        **{
            KINDS[kind].link: tuple(max(replica.copied.get(kind, 0.0) for replica in replicas) for replicas in stages)
            for kind in COPIES
        },
        memory_d=tuple(max(0.0, min(replica.released for replica in replicas)) for replicas in stages),
        num_blocks=tuple(max(replica.num_blocks for replica in replicas) for replicas in stages),
        memory_outside=tuple(max(replica.outside for replica in replicas) for replicas in stages),
        memory_s=tuple(softmax),
        memory_t=tuple(-kept for kept in softmax),
    )
    return MeasuredCosts(
        costs,
        max(chunk.noise for chunks, _ in gathered for chunk in chunks),
        tuple(max(chunk.inside for chunk in by_stage[stage]) for stage in range(placement.num_stages)),
        duration_ratio([chunk.pairs for chunks, _ in gathered for chunk in chunks]),
    )
