"""Measures the costs of each unit of a model on this process's device, before the model is built.

A unit is the embedding, one layer, or all that follows the layers. Each is built as a pipeline stage of its own, which
the executor runs between made-up neighbours. F, B and W are therefore the same as in a training, and are measured in
the same way.
"""

from __future__ import annotations

import gc
import importlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config, unwrap_model

from megatron.zero_bubble.mcore.communication_costs import (
    collective,
    exchange,
    measure_beside_compute,
    measure_collective_of_pipeline,
    measure_message,
)
from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.model_units import Unit, UnitModels, release
from megatron.zero_bubble.mcore.paired_stage import PairedStage, refuse_unpaired
from megatron.zero_bubble.mcore.restart import Restart
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.channel_memory import ChannelCommunicator
from megatron.zero_bubble.runtime.cold_caches import ColdCaches
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.in_memory import MadeUpNeighbours
from megatron.zero_bubble.runtime.memory_meter import memory_meter
from megatron.zero_bubble.runtime.pair_times import PairTime, duration_ratio
from megatron.zero_bubble.runtime.profiler import Profiler
from megatron.zero_bubble.runtime.recorder import OpRecorder, device_clock
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, lower
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts

SECONDS = 2.0
"""Default time for building all units and all passes through them."""
_MOST_PASSES = 15
"""Most passes through a unit that are timed."""
_GAP_PASSES = 2
"""Passes through a unit in which the time between operations is measured."""


def measure_model(
    models: UnitModels,
    kinds: Sequence[int],
    communicator: type[ChannelCommunicator],
    timeout: timedelta,
    seconds: float,
    *,
    pairs: bool = False,
) -> tuple[ModelCosts, float | None]:
    """Measure the costs of a model's units, and of a message between ranks.

    This is a collective call of the whole job, with the same result on every rank.

    Every rank measures every unit, all at the same time. Their median counts: ranks that measure the same differ by
    noise, of which the slowest would have most. Times are in milliseconds, memory in bytes. `time_r` and `memory_r` of
    a layer are the time and the restored memory of its full recomputation. Random states are the same afterwards.

    Args:
        kinds: for each layer of the model which layer of `Unit.layer` it is like.
        communicator: the class of the channels over which a message is measured.
        timeout: for one message.
        seconds: time for all units; each is timed at least once, however long that takes.
        pairs: whether the model may run forwards and backwards as one (see `PairedStage`), so that each unit runs one
            pair, too. Exchanges of tokens between experts count as far as the pair hides them.

    Returns:
        The costs, and how many times as long F and B take as one operation as one after the other; None without pairs.

    Raises:
        ValueError: the model is to have pairs, and cannot.
    """
    with _undisturbed():
        measured = _measure_units(models, _units(kinds), seconds, pairs=pairs)
    everyone: list[list[MeasuredUnit]] = [measured] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    embedding, *of_layers, output = (
        _median([replica.costs for replica in replicas]) for replicas in zip(*everyone, strict=True)
    )
    one_layer = [measured for replicas in everyone for measured in replicas[1:-1]]
    spread = statistics.median(measured.spread for measured in one_layer)
    between = statistics.median(measured.time_between for measured in one_layer)
    message = measure_message(communicator, models.message, timeout)
    layers = tuple(of_layers[kind] for kind in kinds)
    taken = (measure_beside_compute(models.message, communicate) for communicate in (exchange, collective))
    of_exchange, of_collective = taken
    costs = ModelCosts(
        embedding,
        layers,
        output,
        message,
        time_exchange=of_exchange,
        time_collective=of_collective,
        latency_collective=measure_collective_of_pipeline(models.message, timeout),
        time_between=between,
        spread=spread,
    )
    return costs, duration_ratio([unit.pairs for units in everyone for unit in units])


def count_states(models: UnitModels, kinds: Sequence[int]) -> list[float]:
    """Build all units to count the bytes of the states of the embedding, of every layer and of the output, in order."""
    units = _units(kinds)
    states = []
    with _undisturbed():
        for index in range(len(units)):
            unit_run = _UnitRun(models, units, index)
            states.append(unit_run.state_bytes())
            unit_run.close()
    embedding, *of_layers, output = states
    return [embedding, *(of_layers[kind] for kind in kinds), output]


def _units(kinds: Sequence[int]) -> list[Unit]:
    """The units that differ, in model order."""
    layers = [Unit(layer=kind) for kind in range(max(kinds) + 1)]
    return [Unit(embeds=True), *layers, Unit(is_last=True)]


def _median(measured: Sequence[UnitCosts]) -> UnitCosts:
    values = {
        field.name: statistics.median(getattr(costs, field.name) for costs in measured) for field in fields(UnitCosts)
    }
    return UnitCosts(**values)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let units run as stages of a pipeline of one rank inside the `with` block; restore the global state after it."""
    random_states = Restart([])
    virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(1)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    yield
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_pipeline_model_parallel_world_size(None)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual_size)
    random_states.apply()
    _free()


def clear_losses() -> None:
    """Forget the sums of losses, which megatron-core makes anew at a model's first forward, in that model's size."""
    MTPLossLoggingHelper.tracker.clear()
    _losses_of_experts().clear()


def _losses_of_experts() -> dict[str, Any]:
    """Return where megatron-core adds up the losses by which experts are balanced."""
    if find_spec(f"{moe_utils.__package__}.moe_logging") is None:  # before megatron-core 0.18
        return moe_utils.get_moe_layer_wise_logging_tracker()
    return importlib.import_module(f"{moe_utils.__package__}.moe_logging").get_moe_metrics_tracker().metrics


class MeasuredUnit(NamedTuple):
    """The costs of a unit, and how its operations ran."""

    costs: UnitCosts
    spread: float
    """Largest relative spread of a duration: half the interquartile range over the median."""
    time_between: float
    """Median milliseconds from the end of an operation to the start of the next one."""
    pairs: PairTime


def _measure_units(models: UnitModels, units: Sequence[Unit], seconds: float, *, pairs: bool) -> list[MeasuredUnit]:
    """Measure all units on this rank; a collective call, because ranks that share a unit must pass it equally often.

    Each round passes every unit once, so that a device which is slower for a while is so for all units. Each operation
    finds cold caches, as in a training.
    """
    end = time.perf_counter() + seconds
    unit_runs = [_UnitRun(models, units, index, pairs=pairs) for index in range(len(units))]
    for _ in range(_GAP_PASSES):
        for unit_run in unit_runs:
            unit_run.run_for_gaps()
    caches = ColdCaches(torch.device(torch.cuda.current_device()))
    start = time.perf_counter()
    for unit_run in unit_runs:
        unit_run.run_measured(caches, with_memory=True)
    now = time.perf_counter()
    for _ in range(_agreed_passes((end - now) / (now - start))):
        for unit_run in unit_runs:
            unit_run.run_measured(caches)
    measured = [unit_run.costs() for unit_run in unit_runs]
    for unit_run in unit_runs:
        unit_run.close()
    return measured


def _agreed_passes(fitting: float) -> int:
    """Return how many more passes all ranks run; a collective call. `fitting` is how many this rank has time for."""
    passes = torch.tensor(max(0, min(_MOST_PASSES - 1, math.floor(fitting))), device=torch.cuda.current_device())
    dist.all_reduce(passes, op=dist.ReduceOp.MIN)
    return int(passes.item())


def _free() -> None:
    """Free the memory of models that are no longer used."""
    gc.collect()
    torch.cuda.empty_cache()


def _with_a_pair(placement: Placement, own: int) -> Schedule:
    """A schedule of two microbatches in which rank `own` runs F and B alone, and the other F and B as a pair."""
    f, b = ((Op(kind, 0), Op(kind, 1)) for kind in (OpKind.F, OpKind.B))
    weights = (Op(OpKind.W, 0), Op(OpKind.W, 1))
    paired = (*f, Op(OpKind.PB, 0), b[1], *weights)
    before, after = (*f, *b, *weights), (f[0], b[0], f[1], b[1], *weights)
    ops = (*[before] * own, paired, *[after] * (placement.num_ranks - own - 1))
    return Schedule("a pair", placement, 2, ops)


class _UnitRun:
    """Runs one microbatch after another through a unit, and collects the measurements."""

    def __init__(self, models: UnitModels, units: Sequence[Unit], index: int, *, pairs: bool = False) -> None:
        self._models, self._unit, self._index, self._pairs = models, units[index], index, pairs
        self._store = WeightGradStore()
        self._model: Any = models.build(units[index], self._store)
        self._placement = Placement("linear", len(units))
        schedule = _with_a_pair(self._placement, index) if pairs else generate("zb-h1", len(units), 1)
        self._num_microbatches = schedule.num_microbatches
        self._executor = Executor(lower(schedule), index, MadeUpNeighbours(), self._store)
        self._profiler = Profiler(self._placement, index)
        self._gaps: list[float] = []
        """Milliseconds between two operations."""
        self._device = next(self._model.parameters()).device
        self._config = get_model_config(self._model)
        self._config.no_sync_func = self._model.no_sync
        if pairs:
            refuse_unpaired(self._config, type(unwrap_model(self._model)))

    def run_for_gaps(self) -> None:
        """Measure the time between two operations."""
        recorder = OpRecorder(device_clock(self._device))
        self._run(recorder)
        self._gaps += [(after.start - before.end) * 1e3 for before, after in pairwise(recorder.take())]

    def run_measured(self, caches: ColdCaches, *, with_memory: bool = False) -> None:
        """Measure the operations; before each one the caches are evicted."""
        meter = memory_meter(self._device, self._store) if with_memory else None
        recorder = OpRecorder(device_clock(self._device), meter, caches.evict)
        caches.evict()
        self._run(recorder)
        self._profiler.add(recorder.take())

    def _run(self, recorder: OpRecorder) -> None:
        """Run F, B and W of one microbatch, or of two with a pair.

        Another one seems to follow, because DDP reduces gradients with the last one.
        """
        stage_class = partial(PairedStage, recorder=recorder) if self._pairs else MegatronStage
        stage = stage_class(
            forward_step_func=self._models.forward_step,
            data_iterators=[self._models.data],
            model_chunks=[self._model],
            placement=self._placement,
            rank=self._index,
            num_microbatches=self._num_microbatches + 1,
            output_shape=self._models.message.shape,
            cp_group_size=self._models.context_parallel_size,
            device=self._device,
        )
        self._executor.run(stage, recorder)
        stage.finish()
        clear_losses()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def costs(self) -> MeasuredUnit:
        """Return the medians of all measured passes."""
        [measured] = self._profiler.costs()
        times, exchanged = measured.times, measured.exchanged
        kept, waiting = measured.memory[OpKind.F], measured.memory[OpKind.F] + measured.memory[OpKind.B]
        is_layer = self._unit.layer is not None
        input_bytes = math.prod(self._models.message.shape) * self._models.message.dtype.itemsize
        costs = UnitCosts(
            time_f=times[OpKind.F],
            time_b=times[OpKind.B],
            time_w=times[OpKind.W],
            memory_f=kept,
            memory_b=waiting - kept,
            # All is released then: what is left on a device are messages, which a stage has one of and not every unit.
            memory_w=-waiting,
            time_r=times[OpKind.F] if is_layer else 0.0,
            memory_r=max(0.0, kept - input_bytes) if is_layer else 0.0,
            num_blocks=float(is_layer),
            state=self.state_bytes(),
            all_to_all_f=min(times[OpKind.F], exchanged.get(OpKind.F, 0.0)),
            all_to_all_b=min(times[OpKind.B], exchanged.get(OpKind.B, 0.0)),
        )
        return MeasuredUnit(costs, measured.noise, max(0.0, statistics.median(self._gaps)), measured.pairs)

    def close(self) -> None:
        """Free the unit."""
        release([self._model])

    def state_bytes(self) -> float:
        parameters = [parameter for parameter in unwrap_model(self._model).parameters() if parameter.requires_grad]
        # megatron-core marks the parameters of experts, whose gradients are reduced over fewer ranks.
        expert = sum(parameter.numel() for parameter in parameters if not getattr(parameter, "allreduce", True))
        return self._models.state_bytes(sum(parameter.numel() for parameter in parameters) - expert, expert)
