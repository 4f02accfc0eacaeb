"""Estimates the time and the memory of a partition (number of layers of each stage) without planning a schedule."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate, chain, pairwise
from math import inf
from operator import mul, sub

from megatron.zero_bubble.planner.request import tolerance
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts, Partition, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute

STAGES_WEIGHT = 0.2
"""`Balance.time` is `Balance.estimate` times `1 + STAGES_WEIGHT * u + HOLDING_WEIGHT * v`; u is the `_unevenness` of
the stages' work, and v is the `_unevenness` of the ranks' memory."""
HOLDING_WEIGHT = 0.1
"""Weight of the `_unevenness` of the ranks' memory in `Balance.time` (see the formula at `STAGES_WEIGHT`)."""


class Balance:
    """Estimates the time of an iteration with a partition of a model, without planning a schedule.

    Args:
        model: costs of the units of the model.
        placement: placement of the stages on the ranks.
        num_microbatches: microbatches of an iteration.
        recompute: which microbatches have an R (recomputation).
        capacity: memory of a rank for model states (parameters, gradients, optimizer states) and activations.
        limits: rank -> memory limit of its activations; None for no limits.
        in_blocks: whether every stage recomputes its activations block by block (see `block_groups`).
    """

    def __init__(
        self,
        model: ModelCosts,
        placement: Placement,
        num_microbatches: int,
        recompute: Recompute = Recompute.NONE,
        capacity: float = inf,
        limits: Sequence[float] | None = None,
        *,
        in_blocks: bool = False,
    ) -> None:
        self.model = model
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.capacity = capacity + tolerance(capacity)
        self.limits = [limit + tolerance(limit) for limit in limits or (inf,) * placement.num_ranks]
        self.stages_of = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        self._shard_work = model.shard_work
        full, any_r = recompute is Recompute.FULL, recompute is not Recompute.NONE
        self._recomputes = any_r
        self._work = _Sums(model, lambda unit: unit.time_f + unit.time_b + unit.time_w + full * unit.time_r)
        self._recomputed = _Sums(model, lambda unit: full * unit.time_r)
        self._forward = _Sums(model, lambda unit: unit.time_f)
        self._state = _Sums(model, lambda unit: unit.state)
        self._needed = _Sums(model, lambda unit: unit.memory_f + max(0, unit.memory_b) - any_r * unit.memory_r)
        self._memory = _Sums(model, lambda unit: unit.memory_f)
        self._restored = _Sums(model, lambda unit: unit.memory_r)
        self._blocks = _Sums(model, lambda unit: in_blocks * unit.num_blocks)

    def without_limits(self) -> Balance:
        """The same estimates for ranks with unlimited memory."""
        unlimited = copy(self)
        unlimited.capacity, unlimited.limits = inf, [inf] * self.placement.num_ranks
        return unlimited

    @property
    def least_layers(self) -> Partition:
        """Stage -> least number of layers: 0 for a stage with the whole embedding or the whole output layer, else 1."""
        last = self.placement.num_stages - 1
        return tuple(int(0 < stage < last or self.model.shard is not None) for stage in range(last + 1))

    @property
    def equal_work(self) -> Partition:
        """The partition into stages of nearly equal work, in which every stage has at least `least_layers` layers."""
        least, cuts = self.least_layers, [0]
        for stage, target in enumerate(self._work.equal_shares(len(least))):
            most = len(self.model.layers) - sum(least[stage + 1 :])
            cuts.append(min(max(target, cuts[-1] + least[stage]), most))
        return tuple(end - start for start, end in pairwise(cuts))

    def estimate(self, partition: Sequence[int]) -> float:
        """A lower bound on the makespan: the latest end of a rank if every rank runs without idle time.

        A rank starts when the first microbatch has passed through all stages before the first stage of the rank.
        """
        cuts = list(accumulate(partition))
        return max(self._ends(cuts, self._works(cuts)))

    def order(self, partition: Sequence[int]) -> tuple[float, float, float]:
        """Sort key that puts the best partition first: excess memory, then time, then unevenness of end times."""
        cuts = list(accumulate(partition))
        time, ends = self._time_and_ends(cuts)
        return sum(self._excess(cuts)), time, _unevenness(ends)

    def time(self, partition: Sequence[int]) -> float:
        """Time by which partitions are compared, increased if stages differ in work or ranks differ in memory.

        The factors for differences in work (`STAGES_WEIGHT`) and in memory (`HOLDING_WEIGHT`) come from measured runs.
        """
        return self._time_and_ends(list(accumulate(partition)))[0]

    def _time_and_ends(self, cuts: Sequence[int]) -> tuple[float, list[float]]:
        works = self._works(cuts)
        ends = self._ends(cuts, works)
        lost = STAGES_WEIGHT * _unevenness(works) + HOLDING_WEIGHT * _unevenness(self._holdings(cuts))
        return max(ends) * (1 + lost), ends

    def excess(self, partition: Sequence[int]) -> float:
        """Memory by which model states and one microbatch exceed `capacity` or `limits`, summed over all ranks."""
        return sum(self._excess(list(accumulate(partition))))

    def busiest(self, partition: Sequence[int]) -> int:
        """The rank whose memory is exceeded the most; if no rank's memory is exceeded, the rank that ends last."""
        cuts = list(accumulate(partition))
        excess = self._excess(cuts)
        load = excess if max(excess) > 0 else self._ends(cuts, self._works(cuts))
        return load.index(max(load))

    def _works(self, cuts: Sequence[int]) -> list[float]:
        """Stage -> its work for one microbatch. The last stage needs no R, because its B usually runs right after F."""
        works = self._work.of_stages(cuts)
        works[-1] -= self._recomputed.of_stages(cuts)[-1]
        return works

    def _ends(self, cuts: Sequence[int], works: Sequence[float]) -> list[float]:
        """Rank -> time at which the rank ends if it never idles; `works` gives each stage's work for one microbatch."""
        starts = list(accumulate(self._forward.of_stages(cuts), initial=0.0))
        return [
            starts[stages[0]]
            + stages[0] * self.model.time_comm
            + self.num_microbatches * (self._shard_work + sum(map(works.__getitem__, stages)))
            for stages in self.stages_of
        ]

    def _holdings(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """Rank -> memory of its activations, up to a common factor; early stages hold activations for longer."""
        size = len(cuts)
        holdings = [memory * (size - stage) for stage, memory in enumerate(self._memory.of_stages(cuts))]
        return self.placement.sums(holdings)

    def _excess(self, cuts: Sequence[int]) -> list[float]:
        """Rank -> memory that one microbatch needs beyond the rank's limit or, with model states, beyond `capacity`.

        If recomputation is allowed, the microbatch drops its activations, and a rank restores the activations of one
        stage at a time.
        """
        if self.capacity == inf == min(self.limits):
            return [0.0] * self.placement.num_ranks
        states = self._state.of_stages(cuts)
        needed, restored = self._needed.of_stages(cuts), [0.0] * len(cuts)
        if self._recomputes:
            stages_restored = zip(self._restored.of_stages(cuts), self._blocks.of_stages(cuts), strict=True)
            restored = [memory / max(1, number) for memory, number in stages_restored]
        excess = []
        for stages, limit in zip(self.stages_of, self.limits, strict=True):
            state = self.model.shard_state + sum(map(states.__getitem__, stages))
            activations = sum(map(needed.__getitem__, stages)) + max(map(restored.__getitem__, stages))
            excess.append(max(0, state + activations - self.capacity, activations - limit))
        return excess


def _unevenness(values: Sequence[float]) -> float:
    """The mean of the squares of `values`, divided by the square of the mean of `values`; 1 if all values are equal."""
    total = sum(values)
    return len(values) * sum(map(mul, values, values)) / total**2 if total > 0 else 1


class _Sums:
    """Sums of one kind of cost over the units of each stage."""

    def __init__(self, model: ModelCosts, value: Callable[[UnitCosts], float]) -> None:
        self._ends = value(model.embedding), value(model.output)
        self._before = list(accumulate(map(value, model.layers), initial=0.0))
        self._is_zero = not any(self._ends) and not any(self._before)

    def equal_shares(self, num_stages: int) -> list[int]:
        """Stage -> number of layers up to the end of the stage.

        The stages are divided so that the sum of costs over the units of a stage is nearly equal for all stages.
        """
        first, last = self._ends
        total = first + self._before[-1] + last
        shares = (total * (stage + 1) / num_stages - first for stage in range(num_stages - 1))
        middles = [(before + after) / 2 for before, after in pairwise(self._before)]
        return [*(bisect(middles, share) for share in shares), len(middles)]

    def of_stages(self, cuts: Sequence[int]) -> list[float]:
        """Stage -> sum of costs over its units; `cuts` has the number of layers up to the end of each stage."""
        if self._is_zero:
            return [0.0] * len(cuts)
        before = list(map(self._before.__getitem__, cuts))
        sums = list(map(sub, before, chain((0.0,), before)))
        sums[0] += self._ends[0]
        sums[-1] += self._ends[1]
        return sums
