"""Schedules whose embedding and output layer are spread over all ranks, from schedules of every other kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from math import inf

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Placement, Schedule
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.search.gaps import fill_gaps
from megatron.zero_bubble.schedule.shard_ops import interval, shortest_delay, with_vocabulary
from megatron.zero_bubble.schedule.simulate import simulate

Limits = tuple[float, ...]
RESERVES = (1, 0.5, 0)
"""How many microbatches the limit of the schedule below may be smaller, to leave room for those that the delay adds."""
OVERHANGS = (0, 0.5, 1)
"""How much longer than a gap a weight gradient may be that fills it, in parts of its own time."""
NUM_FILLED = 2
"""Of how many delays the gaps are filled anew."""


def best_with_vocabulary(
    make: Callable[[Limits | None], Schedule], placement: Placement, costs: StageCosts, limits: Limits | None
) -> Schedule:
    """The best schedule with operations on vocabulary shards that comes from one without, by simulation.

    Args:
        make: makes the schedule without them, for costs in which W takes their time, within limits; it may raise
            `Infeasible`.
        limits: one a rank; None for those of the schedule itself.

    Raises:
        Infeasible: no delay keeps within the limits.
    """
    best: tuple[float, float, Schedule] | None = None
    least = inf
    for candidate in _candidates(_without_shards(make, placement, costs, limits), costs, limits):
        peaks = peak_memory(candidate, costs)
        if limits is not None and any(peak > limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True)):
            least = min(least, max(peaks))
            continue
        timeline = simulate(candidate, costs)
        if best is None or (timeline.cost, timeline.makespan) < best[:2]:
            best = timeline.cost, timeline.makespan, candidate
    if best is None:
        assert limits is not None
        raise Infeasible(
            f"no schedule with vocabulary shards fits into a memory limit of {max(limits):g}; "
            f"{least:g} is enough for every rank",
            least,
        )
    return best[2]


def _candidates(without_shards: Iterable[Schedule], costs: StageCosts, limits: Limits | None) -> Iterator[Schedule]:
    for schedule in without_shards:
        step = interval(schedule, costs)
        shortest = shortest_delay(costs)
        delays = sorted({max(shortest, delay) for delay in (shortest, step / 2, step, step + shortest, 1.5 * step)})
        shifted = [with_vocabulary(schedule, costs, delay) for delay in delays]
        yield from shifted
        if schedule.splits_backward:
            shifted.sort(key=lambda each: simulate(each, costs).cost)
            for each, overhang in product(shifted[:NUM_FILLED], OVERHANGS):
                filled = fill_gaps(each, costs, limits or peak_memory(each, costs), overhang)
                if filled is not None:
                    yield filled


def _without_shards(
    make: Callable[[Limits | None], Schedule], placement: Placement, costs: StageCosts, limits: Limits | None
) -> Iterator[Schedule]:
    """Yield the schedules to start from, each once."""
    if limits is None:
        yield make(None)
        return
    microbatch = [sum(costs.memory_f[stage] for stage in placement.stages_of(rank)) for rank in range(len(limits))]
    made: list[Schedule] = []
    error: Infeasible | None = None
    for reserve in RESERVES:
        reduced = tuple(limit - reserve * memory for limit, memory in zip(limits, microbatch, strict=True))
        try:
            schedule = make(reduced)
        except Infeasible as reason:
            error = reason
            continue
        if schedule not in made:
            made.append(schedule)
            yield schedule
    if not made:
        assert error is not None
        raise error
