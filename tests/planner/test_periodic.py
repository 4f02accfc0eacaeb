"""A long schedule repeats the steady state of a shorter one: valid, in its memory, and no slower than planned whole."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate, placement_for
from megatron.zero_bubble.planner.periodic import LONG, extended, fewer_microbatches
from megatron.zero_bubble.schedule import StageCosts, simulate, validate
from megatron.zero_bubble.schedule.recomputation import Recompute, num_recomputed

RANKS = 4
EFFORT = 20_000


def costs_of(name: str, num_ranks: int = RANKS) -> StageCosts:
    """Stages whose times differ by up to a fifth, and messages that take a twentieth of one."""
    placement = placement_for(name, num_ranks)
    size, held = placement.num_stages, 1 / placement.num_chunks
    times = tuple(1 + 0.05 * (stage * 7 % 5) for stage in range(size))
    return StageCosts(
        time_f=times,
        time_b=tuple(1.1 * time for time in times),
        time_w=tuple(0.8 * time for time in times),
        time_comm=(0.05,) * (size - 1),
        memory_f=(held,) * size,
        memory_b=(-held / 2,) * size,
        memory_w=(-held / 2,) * size,
    )


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p", "zb-v", "v-half", "v-min"])
def test_an_extended_plan_is_no_slower_than_the_one_planned_whole(name):
    costs, num_microbatches = costs_of(name), 16 * RANKS
    shorter = generate(name, RANKS, 6 * RANKS, costs=costs, effort=EFFORT)
    longer = extended(shorter, num_microbatches, costs)
    assert longer is not None
    validate(longer)
    assert longer.num_microbatches == num_microbatches
    timeline, whole = simulate(longer, costs), generate(name, RANKS, num_microbatches, costs=costs, effort=EFFORT)
    assert timeline.cost <= 1.01 * simulate(whole, costs).cost
    limits = simulate(shorter, costs).peak_memory
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True))


def test_what_is_recomputed_is_repeated_with_it():
    costs, num_ranks = costs_of("auto", 6), 6
    costs = replace(costs, time_r=costs.time_f, memory_r=tuple(0.9 * memory for memory in costs.memory_f))
    limit = 0.6 * num_ranks
    options = {"costs": costs, "memory_limit": limit, "recompute": Recompute.PLANNED, "effort": EFFORT}
    shorter = generate("auto", num_ranks, 6 * num_ranks, **options)
    longer = extended(shorter, 18 * num_ranks, costs, (limit,) * num_ranks)
    assert longer is not None
    validate(longer)
    assert num_recomputed(longer) > 1.5 * num_recomputed(shorter) > 0
    timeline = simulate(longer, costs)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    assert timeline.cost <= 3 * simulate(shorter, costs).cost


def test_a_long_plan_fits_although_every_microbatch_leaves_memory_allocated():
    """A short plan that filled the limit would leave no room for the memory of the microbatches to come."""
    m = LONG // (3 * 2) + 400
    costs = StageCosts.uniform(2, memory_w=-0.499)
    needed = simulate(generate("1f1b", 2, m, costs=costs), costs).peak_memory
    plan = generate("auto", 2, m, costs=costs, memory_limit=max(needed) * 1.01, effort=EFFORT)
    assert max(simulate(plan, costs).peak_memory) <= max(needed) * 1.01


def test_ranks_without_a_rhythm_are_not_extended():
    """In so much memory W's wait for the end of the iteration: no part of it leaves the ranks as they were."""
    costs = costs_of("auto")
    shorter = generate("auto", RANKS, 5 * RANKS, costs=costs, memory_limit=100 * RANKS, effort=EFFORT)
    assert shorter.ops[RANKS - 1][-5 * RANKS :].count(shorter.ops[RANKS - 1][-1]) == 1
    assert extended(shorter, 20 * RANKS, costs) is None


def test_only_long_schedules_are_planned_from_shorter_ones():
    placement = placement_for("zb-2p", 16)
    most = LONG // (3 * 16)
    assert list(fewer_microbatches(placement, most)) == []
    assert list(fewer_microbatches(placement, most + 1)) == [4 * 16 + 1, 6 * 16 + 1, 10 * 16 + 1]
    wide = placement_for("zb-2p", 64)
    assert list(fewer_microbatches(wide, 512)) == [4 * 64]


def test_a_long_schedule_takes_memory_in_proportion_to_its_operations():
    costs, num_microbatches = costs_of("zb-1p", 8), 1000
    tracemalloc.start()
    try:
        schedule = generate("zb-1p", 8, num_microbatches, costs=costs, effort=EFFORT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    validate(schedule)
    num_ops = sum(map(len, schedule.ops))
    assert num_ops >= 3 * 8 * num_microbatches
    print(peak / num_ops)
    assert peak < 1200 * num_ops
