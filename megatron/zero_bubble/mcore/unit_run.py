"""Runs a unit of a model (embedding, layer or output) as a stage on random tensors, and measures F, B and W."""

from __future__ import annotations

import functools
import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config, unwrap_model

from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.model_units import Unit, UnitModels, release
from megatron.zero_bubble.mcore.paired_stage import PairedStage, refuse_unpaired
from megatron.zero_bubble.mcore.step_call import StepCall
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.cold_caches import ColdCaches
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.made_up_neighbours import MadeUpNeighbours
from megatron.zero_bubble.runtime.memory_meter import MemoryMeter, memory_meter
from megatron.zero_bubble.runtime.pair_times import PairTime
from megatron.zero_bubble.runtime.profiler import Profiler
from megatron.zero_bubble.runtime.recorder import MeasuredOp, OpRecorder, device_clock
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, lower
from megatron.zero_bubble.schedule.model_costs import UnitCosts


class MeasuredUnit(NamedTuple):
    """The costs of a unit of a model (embedding, layer or output), and further measurements of its operations."""

    costs: UnitCosts
    spread: float
    """Largest relative spread of the durations of one kind of operation; kinds with negligible durations do not count.

    The relative spread is half the interquartile range, divided by the median.
    """
    time_between: float
    """Median milliseconds from the end of an operation to the start of the next operation."""
    fused_backward: float
    """Median milliseconds of a fused backward, which computes B and W together."""
    split_backward: float
    """Median milliseconds of a B and the W right after it."""
    pairs: PairTime


def clear_losses() -> None:
    """Clear megatron-core's sums of losses, so that the next model's first forward creates sums of the right size."""
    MTPLossLoggingHelper.tracker.clear()
    if find_spec(f"{moe_utils.__package__}.moe_logging") is None:  # before megatron-core 0.18
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        importlib.import_module(f"{moe_utils.__package__}.moe_logging").get_moe_metrics_tracker().metrics.clear()


def _with_a_pair(placement: Placement, rank: int) -> Schedule:
    """Return a schedule of two microbatches in which only rank `rank` runs an F and a B as one operation, a pair."""
    f, b = ((Op(kind, 0), Op(kind, 1)) for kind in (OpKind.F, OpKind.B))
    weights = (Op(OpKind.W, 0), Op(OpKind.W, 1))
    paired = (*f, Op(OpKind.PB, 0), b[1], *weights)
    before, after = (*f, *b, *weights), (f[0], b[0], f[1], b[1], *weights)
    ops = (*[before] * rank, paired, *[after] * (placement.num_ranks - rank - 1))
    return Schedule("a pair", placement, 2, ops)


class UnitRun:
    """Runs one microbatch after another through a unit of the model, and collects the measurements."""

    def __init__(self, models: UnitModels, units: Sequence[Unit], index: int, *, pairs: bool = False) -> None:
        self._models, self._unit, self._index, self._pairs = models, units[index], index, pairs
        self._store = WeightGradStore()
        self._model: Any = models.build(units[index], self._store)
        self._placement = Placement("linear", len(units))
        split, fused = (generate(name, len(units), 1) for name in ("zb-h1", "1f1b"))
        self._split_executor, self._fused_executor = self._executor_of(split), self._executor_of(fused)
        self._executor = self._executor_of(_with_a_pair(self._placement, index)) if pairs else self._split_executor
        """The executor whose operations `run_for_gaps` and `run_measured` measure."""
        self._profiler = Profiler(self._placement, index)
        self._gaps: list[float] = []
        """Milliseconds from the end of each operation to the start of the next operation."""
        self._fused_backwards: list[float] = []
        """Milliseconds of each fused backward, which computes B and W together."""
        self._split_backwards: list[float] = []
        """Milliseconds of each B plus the W right after this B."""
        self._device = next(self._model.parameters()).device
        self._config = get_model_config(self._model)
        self._config.no_sync_func = self._model.no_sync
        if pairs:
            refuse_unpaired(self._config, type(unwrap_model(self._model)))

    def _executor_of(self, schedule: Schedule) -> Executor:
        return Executor(lower(schedule), self._index, MadeUpNeighbours(), self._store)

    def run_for_gaps(self) -> None:
        """Measure the time from the end of each operation to the start of the next operation."""
        ops = self._run(self._executor)
        self._gaps += [(after.start - before.end) * 1e3 for before, after in pairwise(ops)]

    def run_measured(self, caches: ColdCaches, *, with_memory: bool = False) -> None:
        """Measure the operations of a pass through the unit of the model; evict the caches before each operation."""
        meter = memory_meter(self._device, self._store) if with_memory else None
        caches.evict()
        self._profiler.add(self._run(self._executor, meter, caches.evict))

    def run_backwards(self, caches: ColdCaches) -> None:
        """Measure a fused backward, and a B followed by its W; evict the caches only before F and before B."""
        self._split_backwards.append(self._time_of_backward(caches, self._split_executor))
        self._fused_backwards.append(self._time_of_backward(caches, self._fused_executor))

    def _time_of_backward(self, caches: ColdCaches, executor: Executor) -> float:
        """Return the milliseconds from the start of the first operation after F to the end of the last operation."""
        caches.evict()
        evict_once = functools.cache(caches.evict)
        _, *backward = self._run(executor, after_op=evict_once)
        return (backward[-1].end - backward[0].start) * 1e3

    def _run(
        self, executor: Executor, meter: MemoryMeter | None = None, after_op: Callable[[], None] = lambda: None
    ) -> list[MeasuredOp]:
        """Run the schedule of `executor`: two microbatches if the schedule contains a pair, otherwise one."""
        recorder = OpRecorder(device_clock(self._device), meter, after_op)
        stage_class = functools.partial(PairedStage, recorder=recorder) if self._pairs else MegatronStage
        # DDP would reduce gradients in the last microbatch of a step, so the stage expects one more microbatch.
        call = StepCall(**self._models.step_arguments([self._model], executor.schedule.num_microbatches + 1))
        stage = stage_class(call, call.data_iterators, self._placement, self._index, self._device, finalizes=False)
        executor.run(stage, recorder)
        stage.finish()
        clear_losses()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return recorder.take()

    def costs(self) -> MeasuredUnit:
        """Return the costs of the unit of the model, which are medians of all measured passes."""
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
            # W releases all memory of a unit. The memory that is left on a device holds messages, and a stage has one
            # message, however many units it has.
            memory_w=-waiting,
            time_r=times[OpKind.F] if is_layer else 0.0,
            memory_r=max(0.0, kept - input_bytes) if is_layer else 0.0,
            num_blocks=float(is_layer),
            state=self.state_bytes(),
            all_to_all_f=min(times[OpKind.F], exchanged.get(OpKind.F, 0.0)),
            all_to_all_b=min(times[OpKind.B], exchanged.get(OpKind.B, 0.0)),
        )
        fused, split = (statistics.median(times) for times in (self._fused_backwards, self._split_backwards))
        between = max(0.0, statistics.median(self._gaps))
        return MeasuredUnit(costs, measured.noise, between, fused, split, measured.pairs)

    def close(self) -> None:
        """Free the memory of the built model."""
        release([self._model])

    def state_bytes(self) -> float:
        parameters = [parameter for parameter in unwrap_model(self._model).parameters() if parameter.requires_grad]
        # megatron-core marks the parameters of experts, whose gradients are reduced over fewer ranks.
        expert = sum(parameter.numel() for parameter in parameters if not getattr(parameter, "allreduce", True))
        return self._models.state_bytes(sum(parameter.numel() for parameter in parameters) - expert, expert)
