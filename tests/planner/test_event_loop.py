"""Plans of all kinds of operations: what the planner believes of them is what the simulation finds."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from megatron.zero_bubble.planner import v_shaped
from megatron.zero_bubble.planner.fill import InOrder
from megatron.zero_bubble.planner.orders import schedule_of_orders
from megatron.zero_bubble.planner.planned_chunks import plan_chunks
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import GapRule
from megatron.zero_bubble.schedule import Placement, StageCosts, lower, simulate, validate
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.shard_ops import with_best_delay
from tests.planner.planning import LITTLE

PLANNERS = {
    "linear": plan_chunks,
    "v": v_shaped._search,
    "interleaved": plan_chunks,
}


def sharded_problem(kind: str, number: int, recompute: Recompute = Recompute.NONE) -> Problem:
    """A random model whose output layer takes as long as 0.1 to 8 stages, on vocabulary shards."""
    generator = random.Random(f"{kind} {number}")
    num_ranks = generator.randint(2, 6)
    placement = Placement(kind, num_ranks, {"linear": 1, "v": 2, "interleaved": generator.randint(2, 3)}[kind])
    head = generator.choice((0.1, 1, 8)) / num_ranks
    shard = {"time_e": 0.05, "time_ew": 0.1 * head, "time_s": 2 * head, "time_t": head, "memory_s": 0.4}
    costs = StageCosts.uniform(placement.num_stages, 1, 1.1, 0.8, generator.choice((0, 0.1)), time_r=0.9, memory_r=0.8)
    costs = costs.with_shards(placement, {**shard, "memory_t": -0.4})
    limit = placement.num_chunks * generator.uniform(1, 2 * num_ranks) + 1
    takes_makespan = kind == "interleaved"
    num_microbatches = generator.randint(1, 3 * num_ranks)
    limits = (limit,) * num_ranks
    return Problem(
        placement, num_microbatches, costs, limits, recompute=recompute, takes_makespan=takes_makespan, budget=LITTLE
    )


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("kind", PLANNERS)
def test_plans_with_vocabulary_shards_are_what_the_simulation_finds(kind, number):
    problem = sharded_problem(kind, number)
    plan = PLANNERS[kind](problem).best
    schedule = schedule_of_orders(problem, plan.orders)
    timeline = simulate(schedule, problem.costs)
    assert plan.cost == pytest.approx(timeline.makespan if problem.takes_makespan else timeline.cost, rel=1e-9)
    assert plan.cost >= problem.bound * (1 - 1e-9)
    assert max(peak_memory(schedule, problem.costs)) <= problem.limits[0] * (1 + 1e-9)
    validate(lower(schedule, costs=problem.costs))


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.PLANNED])
@pytest.mark.parametrize("kind", PLANNERS)
def test_shards_and_recomputation_are_planned_together(kind, recompute):
    problem = sharded_problem(kind, 0, recompute)
    schedule = schedule_of_orders(problem, PLANNERS[kind](problem).best.orders)
    assert schedule.is_vocabulary_parallel
    assert max(peak_memory(schedule, problem.costs)) <= problem.limits[0] * (1 + 1e-9)
    validate(lower(schedule, costs=problem.costs))


def test_shards_planned_with_the_rest_are_shorter_than_shards_inserted_afterwards():
    """The mean over random problems, in the memory that the inserted ones take."""
    ratios = []
    for number in range(8):
        problem = sharded_problem("linear", number)
        costs = problem.costs.with_vocabulary_in_weight_gradients()
        without = schedule_of_orders(problem, plan_chunks(replace(problem, costs=costs)).best.orders)
        inserted = with_best_delay(without, problem.costs, None)
        limits = tuple(map(max, peak_memory(inserted, problem.costs), problem.smallest_limits))
        plan = plan_chunks(replace(problem, limits=limits)).best
        ratios.append(plan.cost / simulate(inserted, problem.costs).cost)
    assert sum(ratios) / len(ratios) < 0.97


@pytest.mark.parametrize(("kind", "limit"), [("linear", 2), ("v", 3), ("interleaved", 3)])
def test_a_large_limit_of_one_rank_does_not_loosen_the_limit_of_another(kind, limit):
    """A tolerance of 1e-9 of the larger limit is worth 100 microbatches of the other rank."""
    placement = Placement(kind, 2, 1 + (kind != "linear"))
    problem = Problem(placement, 16, StageCosts.uniform(placement.num_stages), (1e11, limit), budget=10_000)
    plan = PLANNERS[kind](problem).best
    assert peak_memory(schedule_of_orders(problem, plan.orders), problem.costs)[1] <= limit


@pytest.mark.parametrize("kind", PLANNERS)
def test_a_candidate_ends_early_only_if_its_cost_exceeds_the_given_cost(kind):
    problem = sharded_problem(kind, 1)
    orders = problem.codes.f_and_b(PLANNERS[kind](problem).best.orders)

    def cost(longest: float) -> float | None:
        plan = InOrder(problem, orders, GapRule.BALANCED).run(longest)
        return None if plan is None else plan.cost

    complete = cost(inf)
    assert complete is not None
    assert cost(complete) == complete
    assert cost(0.5 * complete) is None
