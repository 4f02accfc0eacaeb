"""What real stages keep alive, microbatch by microbatch: exactly what the simulator says."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from megatron.zero_bubble.cli.check.models import Model
from megatron.zero_bubble.cli.check.stage_run import NUM_MICROBATCHES, make_stage
from megatron.zero_bubble.cli.trainings import one_process, rank_model
from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, Schedule, StageCosts, lower, simulate
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.trainer.arguments import Arguments
from tests.turns import run_in_turns

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")

CASES = [("1f1b", 4), ("zb-h1", 4), ("zb-2p", 4), ("interleaved-zb", 2), ("zb-v", 2), ("v-min", 2)]
RECOMPUTED = {"none": [], "full": ["full", "uniform"]}


class Kept:
    """A tensor that autograd keeps for the backward of one microbatch."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class CountingStore(WeightGradStore):
    """A store that remembers the microbatch of every tensor that a W holds."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__(num_chunks)
        self.of: tuple[int, int] | None = None
        self.kept: list[tuple[tuple[int, int], weakref.ref[torch.Tensor]]] = []

    def put(self, weight_grad: Any, held: Sequence[torch.Tensor] = (), *more: Any, **options: Any) -> None:
        assert self.of is not None
        self.kept += [(self.of, weakref.ref(tensor)) for tensor in held]
        super().put(weight_grad, held, *more, **options)


class CountingStage:
    """A `MegatronStage` that counts, before every operation, the microbatches of which tensors are kept."""

    def __init__(self, stage: MegatronStage, store: CountingStore) -> None:
        self._stage, self._store = stage, store
        self._kept: list[tuple[tuple[int, int], weakref.ref[Kept]]] = []
        self.peak_of_graphs = 0
        self.peak_of_all = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def count(self) -> tuple[int, int]:
        graphs = {key for key, kept in self._kept if kept() is not None}
        everything = graphs | {key for key, kept in self._store.kept if kept() is not None}
        self.peak_of_graphs = max(self.peak_of_graphs, len(graphs))
        self.peak_of_all = max(self.peak_of_all, len(everything))
        return len(graphs), len(everything)

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        def keep(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            self._kept.append(((chunk, microbatch), weakref.ref(kept)))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            output = self._stage.forward(microbatch, chunk, input_tensor)
        self.count()
        return output

    def backward(self, microbatch: int, chunk: int, *tensors: Any) -> torch.Tensor | None:
        self._store.of = (chunk, microbatch)
        return self._stage.backward(microbatch, chunk, *tensors)

    def before_gradients(self, op: Any) -> None:
        self.count()
        self._stage.before_gradients(op)


@pytest.fixture(params=RECOMPUTED)
def job(request: pytest.FixtureRequest) -> Iterator[Arguments]:
    args = Model("numerics", 2, 32, 4, 16, 2, 4, vocab_size=120).arguments(4)
    if RECOMPUTED[request.param]:
        granularity, method = RECOMPUTED[request.param]
        args = replace(args, recompute_granularity=granularity, recompute_method=method, recompute_num_layers=1)
    with one_process(args):
        yield args


def peaks(schedule: Schedule, *, until: str) -> tuple[float, ...]:
    """The most microbatches alive at once on each rank in the simulation; one lives from its F to its B or its W."""
    b, w = (-1, 0) if until == "B" else (0, -1)
    costs = StageCosts.uniform(schedule.num_stages, memory_f=1, memory_b=b, memory_w=w)
    return tuple(simulate(schedule, costs).peak_memory)


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_a_real_stage_keeps_what_the_simulator_says(job: Arguments, name: str, num_ranks: int) -> None:
    schedule = generate(name, num_ranks, NUM_MICROBATCHES)
    placement = schedule.placement

    def run(rank: int, communicator: Communicator) -> CountingStage:
        store = CountingStore(placement.num_chunks)
        chunks = rank_model(job, placement, rank, store)
        stage = CountingStage(make_stage(job, placement, rank, chunks, torch.device("cpu")), store)
        Executor(lower(schedule), rank, communicator, store).run(stage)
        assert stage.count() == (0, 0), "something outlives the step"
        return stage

    stages = run_in_turns(num_ranks, run)
    assert tuple(stage.peak_of_graphs for stage in stages) == peaks(schedule, until="B")
    assert tuple(stage.peak_of_all for stage in stages) == peaks(schedule, until="W")


class CountingRecorder:
    """A recorder that counts, after every operation, the microbatches of which autograd keeps tensors of layers."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._of = (0, 0)
        self._kept: list[tuple[tuple[int, int], weakref.ref[Kept]]] = []
        self._hooks = [torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor) for _ in chunks]
        self.peak = 0
        for chunk, hooks in zip(chunks, self._hooks, strict=True):
            for layer in chunk.modules():
                if isinstance(layer, TransformerLayer):
                    layer.register_forward_pre_hook(lambda *_, hooks=hooks: hooks.__enter__())
                    layer.register_forward_hook(lambda *_, hooks=hooks: hooks.__exit__(None, None, None))

    def _keep(self, tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        self._kept.append((self._of, weakref.ref(kept)))
        return kept

    def begin(self, op: Op) -> None:
        self._of = (op.chunk, op.microbatch)

    def end(self, *ops: Op) -> None:
        self.peak = max(self.peak, len({of for of, kept in self._kept if kept() is not None}))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("job", ["full"], indirect=True)
@pytest.mark.parametrize(
    ("name", "num_ranks", "recompute", "limit"),
    [
        ("zb-h1", 4, Recompute.FULL, None),
        ("zb-v", 2, Recompute.FULL, None),
        ("auto", 4, Recompute.PLANNED, 2.5),
    ],
)
def test_a_real_stage_keeps_layers_from_f_or_r_on(
    job: Arguments, name: str, num_ranks: int, recompute: Recompute, limit: float | None
) -> None:
    schedule = generate(name, num_ranks, NUM_MICROBATCHES, recompute=recompute, memory_limit=limit)
    assert schedule.recomputes
    placement = schedule.placement

    def run(rank: int, communicator: Communicator) -> int:
        store, recomputation_store = WeightGradStore(placement.num_chunks), RecomputationStore()
        chunks = rank_model(job, placement, rank, store)
        stage = make_stage(job, placement, rank, chunks, torch.device("cpu"))
        recorder = CountingRecorder(chunks)
        executor = Executor(lower(schedule), rank, communicator, store, recomputation_store)
        executor.run(replace(stage, recomputation_store=recomputation_store), recorder)  # type: ignore[arg-type]
        return recorder.peak

    costs = StageCosts.uniform(schedule.num_stages, memory_f=1, memory_b=-1, memory_w=0)
    simulated = simulate(schedule, replace(costs, memory_r=costs.memory_f)).peak_memory
    assert tuple(run_in_turns(num_ranks, run)) == tuple(simulated)
