"""Searches for the partition (number of layers of each stage) in which the busiest rank ends as early as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from megatron.zero_bubble.planner.balance import Balance
from megatron.zero_bubble.schedule.model_costs import Partition

ALIKE = 1.005
"""Plans that take at most `ALIKE` times as long as the fastest plan count as equally fast, because measured costs have
errors. Among equally fast plans, the plan with the most even partition is chosen."""

KICK = 3
"""Number of random moves of single layers before the search for a partition starts again."""
RESTARTS, LEAST_RESTARTS = 60, 4
"""Largest and least number of restarts of the search if the best partition regardless of memory does not fit."""
_MOVES_OF_RESTARTS = 20_000
"""Number of moves of single layers, over all restarts, that bounds the restarts for many stages."""


def unevenness(partition: Partition) -> tuple[int, Partition]:
    """Sort key that puts the most even partition first and, among equals, prefers fewer layers in early stages."""
    return sum(number * number for number in partition), partition


def balanced_partition(balance: Balance) -> Partition | None:
    """The best partition found by moving single layers; None if the model has too few layers.

    The moves start from two partitions: stages with equal numbers of layers, and stages with equal work. If the best
    partition regardless of memory does not fit, the search moves layers within the memory limits, and again from random
    changes of the best partition (iterated local search).
    """
    num_layers, num_stages = len(balance.model.layers), balance.placement.num_stages
    least = balance.least_layers
    if sum(least) > num_layers:
        return None
    few, more = divmod(num_layers - sum(least), num_stages)
    even = tuple(fewest + few + (stage < more) for stage, fewest in enumerate(least))
    starts = list(dict.fromkeys((even, balance.equal_work)))
    best = _best_from(balance.without_limits(), starts)
    if balance.excess(best) == 0:
        return best
    fastest, generator = balance.time(best), Random(0)
    best = _best_from(balance, [*starts, best])
    for _ in range(max(LEAST_RESTARTS, min(RESTARTS, _MOVES_OF_RESTARTS // num_stages**2))):
        excess, time, _ = balance.order(best)
        if excess == 0 and time <= fastest * ALIKE:
            break
        best = _best_from(balance, [_changed(balance, best, generator)], best)
    return best


def _changed(balance: Balance, partition: Partition, generator: Random) -> Partition:
    """Make `KICK` random moves of single layers."""
    for _ in range(KICK):
        moves = list(moves_from(balance, partition, range(len(partition))))
        partition = generator.choice(moves) if moves else partition
    return partition


def _best_from(balance: Balance, starts: Sequence[Partition], best: Partition | None = None) -> Partition:
    """The best of the partition `best` and the partitions that moves of single layers reach from `starts`."""
    for partition in starts:
        partition = _improved(balance, partition, lambda now: balance.stages_of[balance.busiest(now)])
        partition = _improved(balance, partition, lambda now: range(len(now)), within_rank=True)
        if best is None or _is_less(balance.order(partition), balance.order(best)):
            best = partition
    assert best is not None
    return best


def _improved(
    balance: Balance, partition: Partition, givers: Callable[[Partition], Sequence[int]], *, within_rank: bool = False
) -> Partition:
    """Move single layers out of the stages that `givers(partition)` returns, while a move improves the partition."""
    best, improved = balance.order(partition), True
    while improved:
        improved = False
        for changed in moves_from(balance, partition, givers(partition), within_rank=within_rank):
            # Most moves make the partition worse; one value of `Balance.order` is enough to refuse such a move.
            is_worse = balance.excess(changed) > best[0] if best[0] > 0 else balance.time(changed) > best[1]
            if not is_worse and _is_less(order := balance.order(changed), best):
                partition, best, improved = changed, order, True
    return partition


def moves_from(
    balance: Balance, partition: Partition, givers: Sequence[int], *, within_rank: bool = False
) -> Iterator[Partition]:
    """Yield the partitions in which one layer has moved from a stage of `givers` to another stage.

    Args:
        within_rank: whether layers move only between stages of one rank.
    """
    least, rank_of = balance.least_layers, balance.rank_of
    for giver in givers:
        if partition[giver] > least[giver]:
            for taker in range(len(partition)):
                if taker != giver and (not within_rank or rank_of[taker] == rank_of[giver]):
                    moved = list(partition)
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield tuple(moved)


def neighbours(balance: Balance, partition: Partition, longest: float) -> list[Partition]:
    """Partitions that differ from `partition` by one moved layer, the best first.

    Partitions whose estimated time exceeds `longest`, and partitions that need more memory, are left out.
    """
    excess = balance.excess(partition)
    near = (each for each in moves_from(balance, partition, range(len(partition))) if balance.estimate(each) <= longest)
    orders = {each: balance.order(each) for each in near}
    return sorted((each for each, order in orders.items() if order[0] <= excess), key=orders.__getitem__)


def _is_less(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the sequence `first` is lexicographically less than `other` by more than rounding errors."""
    for value, other_value in zip(first, other, strict=True):
        if abs(value - other_value) > 1e-9 * max(value, other_value):
            return value < other_value
    return False
