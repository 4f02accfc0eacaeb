"""Searches how many layers each stage gets: partitions whose busiest rank ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts, Partition, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute

STAGES_WEIGHT = 0.2
"""Share of the time that is lost for each unit by which the stages' work is uneven."""
HOLDING_WEIGHT = 0.1
"""Share of the time that is lost for each unit by which the memory of the ranks is uneven."""
ALIKE = 1.005
"""Partitions are alike if their plans differ by at most this factor: the most even one is then taken, and two
measurements of the same costs lead to the same one."""


class Balance:
    """Estimates how long partitions of one model take for one placement, without planning their schedules.

    Args:
        room: memory of a rank for its states and activations.
        in_blocks: whether every stage restores its activations block by block (see `StageCosts.in_groups`).
    """

    def __init__(
        self,
        model: ModelCosts,
        placement: Placement,
        num_microbatches: int,
        recompute: Recompute = Recompute.NONE,
        room: float = inf,
        *,
        in_blocks: bool = False,
    ) -> None:
        self.model = model
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.room = room
        self.stages_of = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        self._shard_work = model.shard_work
        full, any_r = recompute is Recompute.FULL, recompute is not Recompute.NONE
        self._work = _Sums(model, lambda unit: unit.time_f + unit.time_b + unit.time_w + full * unit.time_r)
        self._forward = _Sums(model, lambda unit: unit.time_f)
        self._held = _Sums(
            model, lambda unit: unit.state + unit.memory_f + max(0, unit.memory_b) - any_r * unit.memory_r
        )
        self._memory = _Sums(model, lambda unit: unit.memory_f)
        self._restored = _Sums(model, lambda unit: any_r * unit.memory_r)
        self._blocks = _Sums(model, lambda unit: in_blocks * unit.num_blocks)

    @property
    def least_layers(self) -> Partition:
        """The least number of layers of every stage: the stages of the embedding and of the output may have none."""
        last = self.placement.num_stages - 1
        return tuple(int(0 < stage < last or self.model.shard is not None) for stage in range(last + 1))

    def estimate(self, partition: Sequence[int]) -> float:
        """A lower bound on the makespan: when the rank ends that has the latest end, if it never waits.

        A rank starts when the first microbatch has come through the stages before its first one.
        """
        return max(self._ends(partition, self._work.of_stages(partition)))

    def order(self, partition: Sequence[int]) -> tuple[float, float, float]:
        """Key by which better partitions come first: memory beyond the room, time, and unevenness of the ranks.

        The time is the estimate with two surcharges that measured runs show: for stages of unequal work, because ranks
        then pass microbatches on less regularly, and for ranks that hold unequal memory.
        """
        works = self._work.of_stages(partition)
        ends = self._ends(partition, works)
        lost = STAGES_WEIGHT * _unevenness(works)
        lost += HOLDING_WEIGHT * _unevenness(self._holdings(partition))
        return sum(self._excess(partition)), max(ends) * (1 + lost), _unevenness(ends)

    def busiest(self, partition: Sequence[int]) -> int:
        """The rank that lacks most memory; where none does, the rank that ends last."""
        excess = self._excess(partition)
        load = excess if max(excess) > 0 else self._ends(partition, self._work.of_stages(partition))
        return load.index(max(load))

    def _ends(self, partition: Sequence[int], works: Sequence[float]) -> list[float]:
        """Rank -> when it ends if it never waits; `works` are those of its stages."""
        starts = list(accumulate(self._forward.of_stages(partition), initial=0.0))
        return [
            starts[stages[0]]
            + stages[0] * self.model.time_comm
            + self.num_microbatches * (self._shard_work + sum(map(works.__getitem__, stages)))
            for stages in self.stages_of
        ]

    def _holdings(self, partition: Sequence[int]) -> list[float]:
        """Rank -> its memory, up to a factor: a stage holds a microbatch as long as later ones work on it."""
        size = len(partition)
        held = [memory * (size - stage) for stage, memory in enumerate(self._memory.of_stages(partition))]
        return [sum(held[stage] for stage in stages) for stages in self.stages_of]

    def _excess(self, partition: Sequence[int]) -> list[float]:
        """Rank -> memory of its states and of one microbatch, recomputed where that is allowed, beyond the room."""
        if self.room == inf:
            return [0.0] * self.placement.num_ranks
        held, blocks = self._held.of_stages(partition), self._blocks.of_stages(partition)
        restored = [
            memory / max(1, number) for memory, number in zip(self._restored.of_stages(partition), blocks, strict=True)
        ]
        return [
            max(
                0,
                self.model.shard_state
                + sum(map(held.__getitem__, stages))
                + max(map(restored.__getitem__, stages))
                - self.room,
            )
            for stages in self.stages_of
        ]


def _unevenness(values: Sequence[float]) -> float:
    """The mean of the squares over the square of the mean: 1 if all are equal."""
    total = sum(values)
    return len(values) * sum(value * value for value in values) / total**2 if total > 0 else 1


class _Sums:
    """Sums a value over the units of every stage."""

    def __init__(self, model: ModelCosts, value: Callable[[UnitCosts], float]) -> None:
        self._ends = value(model.embedding), value(model.output)
        self._before = list(accumulate(map(value, model.layers), initial=0.0))

    def of_stages(self, partition: Sequence[int]) -> list[float]:
        cuts = accumulate(partition, initial=0)
        sums = [self._before[end] - self._before[begin] for begin, end in pairwise(cuts)]
        sums[0] += self._ends[0]
        sums[-1] += self._ends[1]
        return sums


def unevenness(partition: Partition) -> tuple[int, Partition]:
    """Key by which more even partitions come first; of equally even ones those with fewer layers in early stages."""
    return sum(number * number for number in partition), partition


def balanced_partition(balance: Balance) -> Partition | None:
    """The partition with the smallest estimate that moving single layers finds; None if there are too few layers."""
    num_layers, num_stages = len(balance.model.layers), balance.placement.num_stages
    least = balance.least_layers
    if sum(least) > num_layers:
        return None
    few, more = divmod(num_layers - sum(least), num_stages)
    partition = tuple(fewest + few + (stage < more) for stage, fewest in enumerate(least))
    partition = _improved(balance, partition, lambda now: balance.stages_of[balance.busiest(now)])
    return _improved(balance, partition, lambda now: range(num_stages), within_rank=True)


def _improved(
    balance: Balance, partition: Partition, givers: Callable[[Partition], Sequence[int]], *, within_rank: bool = False
) -> Partition:
    """The partition after the best moves of single layers from the stages that `givers` names, while any helps."""
    best, improved = balance.order(partition), True
    while improved:
        improved = False
        for changed in moves_from(balance, partition, givers(partition), within_rank=within_rank):
            if best[0] == 0 and balance.estimate(changed) > best[1]:
                continue  # the time that decides is at least the estimate
            order = balance.order(changed)
            if _is_less(order, best):
                partition, best, improved = changed, order, True
    return partition


def moves_from(
    balance: Balance, partition: Partition, givers: Sequence[int], *, within_rank: bool = False
) -> Iterator[Partition]:
    """Partitions in which one of `givers` has a layer less, and another stage, if asked of the same rank, one more."""
    least, rank_of = balance.least_layers, balance.rank_of
    for giver in givers:
        if partition[giver] > least[giver]:
            for taker in range(len(partition)):
                if taker != giver and (not within_rank or rank_of[taker] == rank_of[giver]):
                    yield moved(partition, giver, taker)


def moved(partition: Partition, giver: int, taker: int) -> Partition:
    """The partition in which stage `giver` has a layer less and stage `taker` one more."""
    changed = list(partition)
    changed[giver] -= 1
    changed[taker] += 1
    return tuple(changed)


def neighbours(balance: Balance, partition: Partition, tolerance: float) -> list[Partition]:
    """Partitions one moved layer away whose time is at most `tolerance` times this one's, the best first."""
    excess, time, _ = balance.order(partition)
    orders = {
        changed: balance.order(changed)
        for changed in moves_from(balance, partition, range(len(partition)))
        if balance.estimate(changed) <= time * tolerance
    }
    near = [each for each, order in orders.items() if order[0] <= excess and order[1] <= time * tolerance]
    return sorted(near, key=orders.__getitem__)


def _is_less(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` comes before `other`, by more than rounding."""
    for mine, theirs in zip(first, other, strict=True):
        if abs(mine - theirs) > 1e-9 * max(mine, theirs):
            return mine < theirs
    return False
