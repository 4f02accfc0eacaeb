"""The executor copies activations to the host and back where the schedule says so: same numbers, less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_executor import assert_equal
from toy_pipeline import Pipeline, Problem, Threads

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.offloading import RULES, with_copies
from megatron.zero_bubble.planner.problem import Problem as PlanningProblem
from megatron.zero_bubble.runtime import offload_store
from megatron.zero_bubble.runtime.copy_lane import ThreadLink
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.memory_meter import SavedTensorMeter
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.profiler import Profiler, combine_costs
from megatron.zero_bubble.runtime.recorder import HostClock, OpRecorder
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import OpKind, Schedule, StageCosts, lower, simulate, validate
from megatron.zero_bubble.schedule.host_link import with_copies_everywhere

NAMES = ("1f1b", "zb-h1", "zb-v", "interleaved-zb")


class OffloadPipeline(Pipeline):
    """All ranks of a schedule with copies, each with a link of its own."""

    def _add_rank(self, rank, communicator):
        store, offload = WeightGradStore(self.schedule.num_chunks), OffloadStore(ThreadLink(1e7))
        self.stages.append(self.stage_type(self.problem, self.schedule, rank, store))
        self.executors.append(Executor(self.schedule, rank, communicator, store, offload_store=offload))
        self.__dict__.setdefault("stores", []).append((store, offload))


@pytest.fixture(autouse=True)
def moves_small_tensors(monkeypatch):
    monkeypatch.setattr(offload_store, "SMALLEST", 0)


def on_threads(schedule: Schedule) -> OffloadPipeline:
    problem = Problem(schedule.num_stages, schedule.num_microbatches)
    return OffloadPipeline(schedule, problem, Threads(schedule.num_ranks, 30.0))


def squeezed(schedule: Schedule, costs: StageCosts, share: float) -> Schedule:
    """The schedule with the copies that bring every rank below a share of the highest peak."""
    limits = (share * max(simulate(schedule, costs).peak_memory),) * schedule.num_ranks
    problem = PlanningProblem(schedule.placement, schedule.num_microbatches, costs, limits)
    found = with_copies(simulate(schedule, costs), problem, RULES[0])
    assert found is not None
    assert OpKind.D in found.kinds
    return found


def measured(pipeline: OffloadPipeline) -> tuple[StageCosts, list[float]]:
    """Run a step; the costs of the stages, and the most that the operations of each rank have held, in bytes."""
    recorders = [
        OpRecorder(HostClock(), SavedTensorMeter(store, offload=offload)) for store, offload in pipeline.stores
    ]
    pipeline.run(recorders)
    gathered, peaks = [], []
    for rank, (recorder, (_, offload)) in enumerate(zip(recorders, pipeline.stores, strict=True)):
        ops, profiler = recorder.take(), Profiler(pipeline.schedule.placement, rank)
        profiler.add(ops)
        gathered.append((profiler.costs(offload=offload), {}))
        held = [0]
        for op in ops:
            held.append(held[-1] + op.memory_change)
        peaks.append(max(held))
    return combine_costs(pipeline.schedule.placement, gathered).costs, peaks


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_with_copies_computes_what_autograd_does(name):
    plain = generate(name, 4, 8)
    costs = replace(StageCosts.uniform(plain.num_stages), memory_d=(0.9,) * plain.num_stages)
    for schedule in (squeezed(plain, costs, 0.75), with_copies_everywhere(plain)):
        schedule = lower(schedule)
        validate(schedule)
        reference = Problem(schedule.num_stages, schedule.num_microbatches)
        pipeline = on_threads(schedule)
        for _ in range(2):
            pipeline.run()
            reference.run_by_autograd()
            assert_equal(pipeline.problem, reference)


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_a_run_is_the_plans(name):
    plain = lower(with_copies_everywhere(generate(name, 4, 8)))
    costs, _ = measured(on_threads(plain))
    assert min(costs.memory_d) > 0
    assert min(costs.time_d) > 0
    assert min(costs.time_h) > 0
    kept = generate(name, 4, 8)
    _, peaks_kept = measured(on_threads(lower(kept)))
    assert peaks_kept == pytest.approx(simulate(kept, costs).peak_memory, rel=0.05)
    schedule = squeezed(kept, costs, 0.75)
    _, peaks = measured(on_threads(lower(schedule)))
    assert peaks == pytest.approx(simulate(schedule, costs).peak_memory, rel=0.05)
    assert max(peaks) < 0.8 * max(peaks_kept)


def test_a_failed_step_gives_its_host_buffers_back(monkeypatch):
    pipeline = on_threads(with_copies_everywhere(lower(generate("1f1b", 1, 3))))
    (stage,), ((_, offload),) = pipeline.stages, pipeline.stores
    pipeline.run()
    num_taken = offload.buffers.num_bytes
    monkeypatch.setattr(stage, "backward", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.run()
    monkeypatch.delattr(stage, "backward")
    assert offload.left() == []
    pipeline.run()
    assert offload.buffers.num_bytes == num_taken
