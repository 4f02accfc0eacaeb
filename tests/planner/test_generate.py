"""Every combination of a request's options ends in a valid schedule within its limits, or names a limit that works."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import PlanRequest, generate
from megatron.zero_bubble.planner.generate import schedule_of
from megatron.zero_bubble.schedule import Infeasible, Placement, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute
from tests.planner.planning import checked

PLACEMENTS = [("linear", 1), ("interleaved", 2), ("interleaved", 3), ("v", 2)]


def model(placement: Placement, recompute: Recompute, *, has_shards: bool) -> StageCosts:
    """Stages of 1.6 units of memory, whose times differ by a factor of two."""
    size = placement.num_stages
    times = [tuple(1 + (stage * step % 5) / 4 for stage in range(size)) for step in (1, 2, 3)]
    costs = StageCosts(*times, (0.1,) * (size - 1), (1.6,) * size, (-0.9,) * size, (-0.7,) * size)
    if recompute is not Recompute.NONE:
        costs = replace(costs, time_r=costs.time_f, memory_r=(1.4,) * size, num_blocks=(2,) * size)
    shard = {"time_e": 0.1, "time_ew": 0.1, "time_s": 0.5, "time_t": 0.3, "memory_s": 0.4, "memory_t": -0.4}
    return costs.with_shards(placement, shard) if has_shards else costs


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    kind, chunks = draw(st.sampled_from(PLACEMENTS))
    placement = Placement(kind, draw(st.integers(2, 4)), chunks)
    recompute = draw(st.sampled_from(Recompute))
    has_shards = draw(st.booleans())
    offloads = recompute is not Recompute.FULL and draw(st.booleans())
    return request_of(
        placement,
        draw(st.integers(1, 9)),
        limit=draw(st.floats(0.3, 1.5)) * placement.num_ranks * chunks * 1.6,
        recompute=recompute,
        has_shards=has_shards,
        group_size=draw(st.sampled_from([None, 2, 3, 5])) if kind == "interleaved" else None,
        offloads=offloads,
        host_rate=1.5 if offloads else None,
        post_validation=draw(st.booleans()),
        spread=draw(st.sampled_from([0, 0.1])),
        effort=draw(st.sampled_from([0, 3_000])),
    )


def request_of(placement, num_microbatches, *, limit, recompute=Recompute.NONE, has_shards, **options) -> PlanRequest:
    return PlanRequest(
        "auto",
        num_microbatches,
        (placement,),
        costs=model(placement, recompute, has_shards=has_shards),
        recomputes=(recompute,),
        vocabulary_parallel=has_shards,
        memory_limit=(limit,) * placement.num_ranks,
        **options,
    )


@settings(max_examples=100, deadline=None)
@given(requests())
@example(request_of(Placement("interleaved", 3, 2), 5, limit=4, has_shards=True, group_size=2, effort=3_000))
def test_any_request_is_planned_within_its_limits_or_refused_with_a_limit_that_works(request):
    try:
        schedule = schedule_of(request)
    except Infeasible as refusal:
        request = request.within((refusal.smallest_limit,) * request.num_ranks)
        schedule = schedule_of(request)
    checked(schedule, request.costs)
    for peak, limit in zip(peak_memory(schedule, request.costs), request.limits, strict=True):
        assert peak <= limit * (1 + 1e-9)


@pytest.mark.parametrize("group_size", [0, -1])
def test_groups_without_a_microbatch_are_refused(group_size):
    with pytest.raises(ScheduleError, match=f"needs microbatch groups of at least 1, got {group_size}"):
        schedule_of(request_of(Placement("interleaved", 2, 2), 4, limit=8, has_shards=False, group_size=group_size))


def test_recomputation_may_be_given_by_its_value():
    assert generate("zb-h1", 2, 4, recompute="full") == generate("zb-h1", 2, 4, recompute=Recompute.FULL)
    assert not generate("zb-h1", 2, 4, recompute="none").recomputes
    with pytest.raises(ValueError, match="'all' is not a valid Recompute"):
        generate("zb-h1", 2, 4, recompute="all")
