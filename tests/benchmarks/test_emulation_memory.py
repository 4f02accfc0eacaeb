"""The activations that an emulated rank holds are counted by the objects' lifetimes: their peak is the simulator's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks.emulation.arguments import EmulationFlags
from benchmarks.emulation.own_run import OwnRun
from benchmarks.emulation.sleeping import Emulation
from benchmarks.emulation.stage_times import StageTimes, time_of_pair
from benchmarks.emulation.variants import contestants
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.planner import generate, placement_for
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, StageCosts, Timeline, lower
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute
from tests.runtime.in_memory import InMemoryCollectives, InMemoryNetwork

COSTS = StageCosts.uniform(3, 0.1, 0.1, 0.1, 0, 1, -0.4, -0.6, time_r=0.1, memory_r=0.9)


def counted(schedule: Schedule, costs: StageCosts) -> list[float]:
    """Run one step of every rank in a thread and return the peaks that they counted."""
    network, shards = InMemoryNetwork(schedule.num_ranks), InMemoryNetwork(schedule.num_ranks)

    def run(rank: int) -> float:
        emulation = Emulation(activation_bytes=64)
        link, group = network.communicator(rank), InMemoryCollectives(shards, rank, schedule.num_ranks)
        own = OwnRun(lower(schedule), costs, emulation, rank, link, None, None, False, False, group)
        own.step()
        emulation.reset()
        assert emulation.memory.peak == pytest.approx(0, abs=1e-12), "nothing is held between two steps"
        own.step()
        own.close()
        return emulation.memory.peak

    with ThreadPoolExecutor(schedule.num_ranks) as pool:
        return list(pool.map(run, range(schedule.num_ranks)))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_the_counted_peak_is_the_simulators(name, recompute):
    schedule = generate(name, 3, 6, costs=COSTS, recompute=recompute)
    assert schedule.recomputes == (recompute is Recompute.FULL)
    assert counted(schedule, COSTS) == pytest.approx(peak_memory(schedule, COSTS))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_so_it_is_with_vocabulary_shards(name):
    placement = placement_for(name, 3)
    shard = {"time_e": 0.02, "time_ew": 0.02, "time_s": 0.1, "time_t": 0.1, "memory_s": 0.25, "memory_t": -0.25}
    costs = COSTS.split_ranks(placement).with_shards(placement, shard)
    schedule = generate(name, 3, 6, costs=costs, vocabulary_parallel=True)
    assert counted(schedule, costs) == pytest.approx(peak_memory(schedule, costs))


def test_so_it_is_where_b_recomputes_and_where_some_microbatches_are_recomputed():
    schedule, costs = generate("zb-h1", 3, 6), COSTS.recomputing_in_backward()
    assert counted(schedule, costs) == pytest.approx(peak_memory(schedule, costs))
    full = generate("zb-h1", 3, 6, costs=COSTS, recompute=Recompute.FULL)
    kept = {Op(OpKind.R, 1), Op(OpKind.R, 4)}
    some = replace(full, ops=tuple(tuple(op for op in ops if op not in kept) for ops in full.ops))
    peaks = peak_memory(some, COSTS)
    assert peaks != peak_memory(full, COSTS)
    assert counted(some, COSTS) == pytest.approx(peaks)


def test_what_is_on_the_host_is_not_counted_and_comes_back_as_it_was():
    costs = replace(COSTS, time_d=(0.1,) * 3, time_h=(0.1,) * 3, memory_d=(0.9,) * 3)
    schedule = generate("auto", 3, 6, costs=costs.keeping_everything(), memory_limit=1.5, offloads=True)
    assert schedule.offloads
    assert counted(schedule, costs) == pytest.approx(peak_memory(schedule, costs))
    other = replace(costs, time_h=(0.2,) * 3)
    with pytest.raises(ValueError, match="copies at one rate: give the same --time-h as --time-d"):
        counted(schedule, other)


def planned(*flags: str) -> dict[str, Timeline]:
    size = ("--pipeline-size", "4", "--num-microbatches", "8", "--memory-r", "0.9")
    return {plan.schedule.name: plan for plan in contestants(read_flags(EmulationFlags, [*size, *flags], "", ""))}


def test_beside_full_recomputation_runs_the_schedule_whose_b_recomputes():
    plans = planned("--schedule", "zb-h1", "--schedule", "1f1b", "--recompute", "full")
    assert list(plans) == ["zb-h1", "zb-h1, R in B", "1f1b", "1f1b, R in B"]
    assert [plan.schedule.recomputes for plan in plans.values()] == [True, False] * 2
    inside = plans["1f1b, R in B"]
    assert (inside.costs.time_b[0], inside.makespan) == (40, (8 + 3) * 80)
    assert plans["1f1b"].makespan < inside.makespan


def test_beside_planned_recomputation_run_nothing_and_everything_recomputed_where_that_fits(capsys):
    both = ["auto, nothing recomputed", "auto, everything recomputed"]
    plans = planned("--schedule", "auto", "--recompute", "planned", "--memory-limit", "3")
    assert list(plans) == ["auto", *both]
    assert all(max(plan.peak_memory) <= 3 for plan in plans.values())
    assert plans["auto"].makespan <= min(plans[name].makespan for name in both)
    tight = planned("--schedule", "zb-v", "--recompute", "planned", "--memory-limit", "0.7")
    assert list(tight) == ["zb-v", "zb-v, everything recomputed"]
    assert "zb-v, nothing recomputed left out: " in capsys.readouterr().err


@pytest.mark.parametrize("time_w", [0, 20])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.8])
def test_a_pair_takes_on_two_lanes_what_the_simulator_says(share, time_w):
    costs = StageCosts.uniform(2, 20, 20, 20, all_to_all_f=20 * share, all_to_all_b=20 * share)
    forward, backward = (StageTimes(costs, Placement("linear", 2), stage) for stage in (0, 1))
    simulated = costs.time_of_pair(0, OpKind.PBW if time_w else OpKind.PB, 1)
    emulated = time_of_pair(forward, backward, time_w)
    assert simulated <= emulated * (1 + 1e-9)
    if share <= 0.5:  # otherwise the link waits for some of what is computed
        assert emulated == pytest.approx(simulated)


@pytest.mark.parametrize(("name", "kind", "num_chunks"), [("dualpipe-v", "v", 2), ("interleaved-pairs", None, 2)])
def test_pairs_hold_what_the_simulator_says(name, kind, num_chunks):
    costs = StageCosts.uniform(4, 0.1, 0.1, 0.1, 0, 1, -0.4, -0.6, all_to_all_f=0.03, all_to_all_b=0.03)
    schedule = generate(name, 2, 4, num_chunks=num_chunks, placement_kind=kind)
    assert counted(schedule, costs) == pytest.approx(peak_memory(schedule, costs))
