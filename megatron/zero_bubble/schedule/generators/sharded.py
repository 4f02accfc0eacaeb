"""Schedules whose embedding and output layer are spread over all ranks, from schedules of every other kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from statistics import mean

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Placement, Schedule
from megatron.zero_bubble.schedule.search.gaps import fill_gaps
from megatron.zero_bubble.schedule.shard_ops import interval, shortest_delay, with_vocabulary
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Timeline

Limits = tuple[float, ...]
RESERVES = (1, 0.5, 0)
"""How many microbatches less the schedule without shards may hold, to leave room for what the delay adds."""
SLACKS = (0, 0.02)
"""How much longer messages take in the schedules without shards, in parts of the mean F. How good the best order found
for some costs is depends on chance: it is searched for costs that differ a little, too."""
MOST_OPERATIONS = 20_000
"""Operations of a schedule up to which it is searched for several costs."""
OVERHANGS = (0.5, 0, 1)
"""How much longer than a gap a weight gradient may be that fills it, in parts of its own time."""
NUM_FILLED = 2
"""How many of the delays, the best ones, are tried with their gaps filled anew."""


def best_with_vocabulary(
    make: Callable[[StageCosts, Limits | None], Schedule],
    placement: Placement,
    costs: StageCosts,
    limits: Limits | None,
    *,
    is_quick: bool = False,
    is_long: bool = False,
) -> Schedule:
    """The best schedule with operations on vocabulary shards that comes from one without, by simulation.

    Args:
        make: makes the schedule without them within limits, for costs in which W takes their time; it may raise
            `Infeasible`.
        limits: one a rank; None for those of the schedule itself.
        is_quick: whether to try only what is best as a rule.
        is_long: whether the schedule is so long that fewer delays are tried, too.

    Raises:
        Infeasible: no delay keeps within the limits.
    """
    is_quick = is_quick or is_long
    without_shards = _without_shards(make, placement, costs, limits, is_quick)
    timelines = list(_candidates(without_shards, limits, costs, is_quick, is_long))
    fitting = [timeline for timeline in timelines if limits is None or _fits(timeline, limits)]
    if not fitting and is_long:
        return best_with_vocabulary(make, placement, costs, limits)
    if not fitting:
        assert limits is not None
        least = min(max(timeline.peak_memory) for timeline in timelines)
        raise Infeasible(
            f"no schedule with vocabulary shards fits into a memory limit of {max(limits):g}; "
            f"{least:g} is enough for every rank",
            least,
        )
    return min(fitting, key=_order).schedule


def _order(timeline: Timeline) -> tuple[float, float]:
    return timeline.cost, timeline.makespan


def _fits(timeline: Timeline, limits: Limits) -> bool:
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True))


def _candidates(
    without_shards: Iterable[Schedule], limits: Limits | None, costs: StageCosts, is_quick: bool, is_long: bool
) -> Iterator[Timeline]:
    for schedule in without_shards:
        step, shortest = interval(schedule, costs), shortest_delay(costs)
        steps = (step / 2, step) if is_long else (shortest, step / 2, step, step + shortest, 1.5 * step)
        delays = sorted({max(shortest, delay) for delay in steps})
        delayed = [simulate(each, costs) for each in with_vocabulary(schedule, costs, delays)]
        yield from delayed
        if schedule.splits_backward:
            promising = sorted(delayed, key=_order)[: 1 if is_quick else NUM_FILLED]
            for timeline, overhang in product(promising, OVERHANGS[: 1 if is_quick else None]):
                filled = fill_gaps(timeline.schedule, costs, limits or timeline.peak_memory, overhang)
                if filled is not None:
                    yield simulate(filled, costs)


def _without_shards(
    make: Callable[[StageCosts, Limits | None], Schedule],
    placement: Placement,
    costs: StageCosts,
    limits: Limits | None,
    is_quick: bool,
) -> Iterator[Schedule]:
    """Yield the schedules to start from, each once."""
    whole = costs.with_vocabulary_in_weight_gradients()
    if limits is None:
        yield make(whole, None)
        return
    microbatch = placement.sums(costs.memory_f)
    made: list[Schedule] = []
    error: Infeasible | None = None
    for slack, reserve in product(SLACKS, RESERVES):
        if slack and made and sum(map(len, made[0].ops)) > MOST_OPERATIONS:
            return
        reduced = tuple(limit - reserve * memory for limit, memory in zip(limits, microbatch, strict=True))
        try:
            schedule = make(_with_longer_messages(whole, slack), reduced)
        except Infeasible as reason:
            error = reason
            continue
        if schedule not in made:
            made.append(schedule)
            yield schedule
        if is_quick:
            return
    if not made:
        assert error is not None
        raise error


def _with_longer_messages(costs: StageCosts, slack: float) -> StageCosts:
    """Add to the time of each message so much of the mean F."""
    added = slack * mean(costs.time_f)
    messages = costs.time_comm or (0,) * (costs.num_stages - 1)
    return replace(costs, time_comm=tuple(each + added for each in messages)) if added else costs
