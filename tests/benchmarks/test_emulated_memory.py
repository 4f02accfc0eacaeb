"""The activations that an emulated rank holds are counted by the objects' lifetimes: their peak is the simulator's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks.emulation.sleeping import Emulation
from benchmarks.emulation.worker import OwnRun
from megatron.zero_bubble.runtime.in_memory import InMemoryNetwork
from megatron.zero_bubble.schedule import Op, OpKind, Schedule, StageCosts, generate, lower
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute

COSTS = StageCosts.uniform(3, 0.1, 0.1, 0.1, 0, 1, -0.4, -0.6, 0.1, 0.9)


def counted(schedule: Schedule, costs: StageCosts) -> list[float]:
    """Run one step of every rank in a thread and return the peaks that they counted."""
    network = InMemoryNetwork(schedule.num_ranks)

    def run(rank: int) -> float:
        emulation = Emulation(activation_bytes=64)
        link = network.communicator(rank)
        step = OwnRun(lower(schedule), costs, emulation, rank, link, None, None, False, False).step
        step()
        emulation.reset()
        assert emulation.memory.peak == pytest.approx(0, abs=1e-12), "nothing is held between two steps"
        step()
        return emulation.memory.peak

    with ThreadPoolExecutor(schedule.num_ranks) as pool:
        return list(pool.map(run, range(schedule.num_ranks)))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_the_counted_peak_is_the_simulators(name, recompute):
    schedule = generate(name, 3, 6, costs=COSTS, recompute=recompute)
    assert schedule.recomputes == (recompute is Recompute.FULL)
    assert counted(schedule, COSTS) == pytest.approx(peak_memory(schedule, COSTS))


def test_so_it_is_where_b_recomputes_and_where_some_microbatches_are_recomputed():
    schedule, costs = generate("zb-h1", 3, 6), COSTS.recomputing_in_backward()
    assert counted(schedule, costs) == pytest.approx(peak_memory(schedule, costs))
    full = generate("zb-h1", 3, 6, costs=COSTS, recompute=Recompute.FULL)
    kept = {Op(OpKind.R, 1), Op(OpKind.R, 4)}
    some = replace(full, ops=tuple(tuple(op for op in ops if op not in kept) for ops in full.ops))
    peaks = peak_memory(some, COSTS)
    assert peaks != peak_memory(full, COSTS)
    assert counted(some, COSTS) == pytest.approx(peaks)
