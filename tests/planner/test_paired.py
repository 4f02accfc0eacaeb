"""Plans with pairs, for models whose layers exchange tokens between experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.layouts import search_layouts
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule import Placement, ScheduleError, lower, simulate, validate
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.generators.dualpipe_v import dualpipe_v
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_pairs
from megatron.zero_bubble.schedule.kinds import PAIRED, OpKind
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute


def costs_of(num_ranks, num_chunks, share=0.3):
    """F, B and W of a whole rank take 1 each; tokens are exchanged for a share of F and of B."""
    part = 1 / num_chunks
    return StageCosts.uniform(
        num_ranks * num_chunks,
        part,
        part,
        part,
        memory_f=part,
        memory_b=-part / 2,
        memory_w=-part / 2,
        all_to_all_f=share * part,
        all_to_all_b=share * part,
    )


def planned(num_ranks, num_microbatches, num_chunks, kind, limit, costs=None, pairs=True):
    return generate(
        "auto",
        num_ranks,
        num_microbatches,
        num_chunks=num_chunks,
        placement_kind=kind,
        costs=costs or costs_of(num_ranks, num_chunks),
        memory_limit=limit,
        pairs=pairs,
        takes_makespan=True,
    )


@pytest.mark.parametrize("num_chunks", [2, 4])
@pytest.mark.parametrize(("per_rank", "gain"), [(2, 1.05), (4, 1.0)])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_plan_beats_megatrons_combined_order_in_its_memory(num_ranks, per_rank, gain, num_chunks):
    costs, num_microbatches = costs_of(num_ranks, num_chunks), per_rank * num_ranks
    megatrons = simulate(interleaved_pairs(num_ranks, num_microbatches, num_chunks=num_chunks), costs)
    limit = max(megatrons.peak_memory)
    plan = planned(num_ranks, num_microbatches, num_chunks, "interleaved", limit)
    validate(lower(plan))
    timeline = simulate(plan, costs)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    assert megatrons.makespan >= gain * timeline.makespan


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 5), (4, 8), (4, 16), (8, 16)])
def test_a_v_is_not_longer_than_dualpipe_v_in_its_memory(num_ranks, num_microbatches):
    costs = costs_of(num_ranks, 2)
    published = simulate(dualpipe_v(num_ranks, num_microbatches), costs)
    plan = simulate(planned(num_ranks, num_microbatches, 2, "v", max(published.peak_memory)), costs)
    assert plan.makespan <= published.makespan * (1 + 1e-9)


def test_pairs_gain_what_they_hide():
    limit = 8.0
    alone = simulate(planned(4, 16, 2, "interleaved", limit, pairs=False), costs_of(4, 2)).makespan
    assert alone >= 1.15 * simulate(planned(4, 16, 2, "interleaved", limit), costs_of(4, 2)).makespan


def test_without_exchanges_a_plan_has_no_pairs_and_is_as_it_was():
    costs = costs_of(4, 2, share=0)
    assert planned(4, 8, 2, "v", 4.0, costs) == planned(4, 8, 2, "v", 4.0, costs, pairs=False)


def test_weight_gradients_are_in_pairs_if_exchanges_leave_time_for_them():
    plan = planned(4, 16, 2, "v", 8.0, costs_of(4, 2, share=0.8))
    assert OpKind.PBW in plan.kinds


def test_each_stage_has_its_weight_gradients_where_they_take_less_time():
    """Exchanges of 0.3 are hidden by F and B alone; those of 0.9 leave time for W."""
    plan = planned(2, 8, 1, "linear", 4.0, replace(costs_of(2, 1), all_to_all_f=(0.3, 0.9), all_to_all_b=(0.3, 0.9)))
    assert [{op.kind for op in lane} & PAIRED for lane in plan.ops] == [{OpKind.PB}, {OpKind.PBW}]


def test_weight_gradients_in_pairs_keep_the_order_of_microbatches():
    """Some backwards run alone and leave W to later, so pairs after them cannot have it."""
    plan = planned(2, 8, 1, "linear", 3.0, costs_of(2, 1, share=0.6))
    assert plan.kinds >= PAIRED
    validate(lower(plan))


def test_exchanges_longer_than_a_usual_forward_can_be_planned():
    costs = StageCosts.uniform(4)
    time_f, exchanged = (1, 1, 1, 4), (0, 0, 0, 3)
    costs = replace(costs, time_f=time_f, time_b=time_f, all_to_all_f=exchanged, all_to_all_b=exchanged)
    validate(lower(planned(4, 8, 1, "linear", 8.0, costs)))


def test_uneven_stages_and_slow_messages_work_too():
    costs = StageCosts(
        time_f=(4, 6, 5, 9),
        time_b=(5, 7, 5, 10),
        time_w=(3, 5, 4, 6),
        time_comm=(0.5, 1, 0.25),
        memory_f=(1, 2, 1.5, 2),
        memory_b=(-0.5, -1, -0.5, -1),
        memory_w=(-0.5, -1, -1, -1),
        all_to_all_f=(0, 2, 1, 3),
        all_to_all_b=(0, 2, 1, 3),
    )
    for num_chunks, kind, ranks in ((1, "linear", 4), (2, "v", 2), (2, "interleaved", 2)):
        plan = planned(ranks, 6, num_chunks, kind, 16.0, costs)
        validate(lower(plan, costs=costs))
        apart = simulate(planned(ranks, 6, num_chunks, kind, 16.0, costs, pairs=False), costs)
        assert simulate(plan, costs).makespan <= apart.makespan
        assert not plan.kinds.isdisjoint(PAIRED)


def test_recomputation_and_pairs_are_refused_together():
    with pytest.raises(ScheduleError, match="do not work with recomputation"):
        generate("auto", 2, 4, costs=costs_of(2, 1), pairs=True, recompute=Recompute.FULL)


@pytest.mark.parametrize("num_microbatches", [7, 40])
def test_where_no_exchange_is_hidden_the_plan_is_the_plan_without_pairs(num_microbatches):
    costs = StageCosts.uniform(4, 1, 1.1, 0.9)
    plans = (planned(4, num_microbatches, 1, "linear", 4.0, costs, pairs) for pairs in (True, False))
    first, second = plans
    assert first == second


def test_a_layout_with_vocabulary_shards_is_chosen_beside_layouts_with_pairs():
    """The output takes as long as six layers: hiding the exchanges of the layers gains less than shards do."""
    layer = UnitCosts(1, 1, 1, 1, -0.5, -0.5, all_to_all_f=0.2, all_to_all_b=0.2)
    model = ModelCosts(UnitCosts(0.1, 0.1, 0.1), (layer,) * 8, UnitCosts(6, 6, 6))
    request = PlanRequest(
        "auto", 8, (Placement("linear", 2),), model, vocabulary_parallel=None, memory_limit=12.0, pairs=True, effort=0
    )
    chosen = search_layouts(request)
    assert (chosen.layout.vocabulary_parallel, chosen.request.pairs) == (True, False)
    few = search_layouts(replace(request, costs=replace(model, output=UnitCosts(0.1, 0.1, 0.1))))
    assert (few.layout.vocabulary_parallel, few.request.pairs) == (False, True)
    assert not few.timeline.schedule.kinds.isdisjoint(PAIRED)


@pytest.mark.parametrize("group_size", [4, 6])
def test_forwards_in_pairs_keep_the_order_of_given_groups(group_size):
    """Dropout draws the random numbers that it draws in megatron-core's order."""
    costs = costs_of(4, 2)
    named = interleaved_pairs(4, 12, num_chunks=2, group_size=group_size)
    options = {"num_chunks": 2, "costs": costs, "memory_limit": 12, "pairs": True, "group_size": group_size}
    paired = generate("auto", 4, 12, **options)
    assert paired.kinds & PAIRED
    for own, others in zip(paired.ops, named.ops, strict=True):
        assert [op for op in own if op.kind is OpKind.F] == [op for op in others if op.kind is OpKind.F]
