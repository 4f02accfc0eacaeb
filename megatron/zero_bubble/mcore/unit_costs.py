"""Measures the costs of each unit of a model on this process's device, before the model is built.

A unit is the embedding, one layer, or all modules after the layers. Each unit of the model is built as a pipeline stage
of its own, which the executor runs with random tensors in place of received messages. The executor runs and measures F,
B and W of a unit of the model in the same way as in training.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from megatron.zero_bubble.mcore import communication_costs
from megatron.zero_bubble.mcore.model_units import Unit, UnitModels
from megatron.zero_bubble.mcore.restart import Restart
from megatron.zero_bubble.mcore.unit_run import MeasuredUnit, UnitRun
from megatron.zero_bubble.runtime.cold_caches import ColdCaches
from megatron.zero_bubble.runtime.communicator import TorchCommunicator
from megatron.zero_bubble.runtime.joint import from_all_ranks, jointly
from megatron.zero_bubble.runtime.pair_times import duration_ratio
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts

SECONDS = 2.0
"""Default time limit in seconds for building all units of the model and running all passes through these units."""
_MOST_PASSES = 15
"""Maximum number of timed passes through a unit of the model."""
_GAP_PASSES = 2
"""Number of passes through a unit of the model that measure the time between operations."""
_PATIENCE = 60.0
"""Seconds that a rank with an error waits for other ranks, which may wait in a collective for the failed rank."""


def measure_model(
    models: UnitModels,
    kinds: Sequence[int],
    communicator: type[TorchCommunicator],
    timeout: timedelta,
    seconds: float,
    *,
    pairs: bool = False,
) -> tuple[ModelCosts, float | None]:
    """Measure the costs of a model's units, and of a message between ranks.

    `measure_model` is a collective call of the whole job and returns the same costs on every rank.

    All ranks measure the same unit of the model at the same time. Each cost is the median over ranks, because the
    measurements of different ranks differ only by noise, and the slowest rank has the most noise. Times are in
    milliseconds, memory in bytes. For a layer, `time_r` is the time of the layer's full recomputation, and `memory_r`
    is the memory that the recomputation restores. At the end, `measure_model` restores the random states.

    Args:
        kinds: for each layer of the model, the number of the layer's kind. Layers of one kind have the same costs. For
            each kind of layer, one unit is measured, whose `Unit.layer` is the number of the kind.
        communicator: the class of the channels over which a message is measured.
        timeout: time limit for one message.
        seconds: time for building and measuring all units; each unit is timed at least once, even if that takes longer.
        pairs: whether the model may run a forward and a backward as one operation, a pair (see `PairedStage`). With
            `pairs`, `UnitCosts.all_to_all_f` and `UnitCosts.all_to_all_b` are the times of the exchanges between
            experts, which a pair overlaps with computation.

    Returns:
        The model's costs, and the ratio of the duration of a pair to the duration of its F and B in sequence. Without
        `pairs`, the second value is None.

    Raises:
        ValueError: `pairs` is set, but the model cannot run a forward and a backward as one operation.
    """
    with undisturbed(), as_one_rank():
        measured = _measure_units(models, _units(kinds), seconds, pairs=pairs)
    everyone = from_all_ranks(measured)
    embedding, *of_layers, output = (
        _median([replica.costs for replica in replicas]) for replicas in zip(*everyone, strict=True)
    )
    one_layer = [measured for replicas in everyone for measured in replicas[1:-1]]
    spread = statistics.median(measured.spread for measured in one_layer)
    between = statistics.median(measured.time_between for measured in one_layer)
    message = models.message
    costs = ModelCosts(
        embedding,
        tuple(of_layers[kind] for kind in kinds),
        output,
        communication_costs.measure_message(communicator, message, timeout),
        time_exchange=communication_costs.measure_beside_compute(message, communication_costs.exchange),
        time_collective=communication_costs.measure_beside_compute(message, communication_costs.collective),
        latency_collective=communication_costs.measure_collective_of_pipeline(message, timeout),
        time_between=between,
        spread=spread,
        fused_backward=_fused_backward(everyone, kinds),
    )
    return costs, duration_ratio([unit.pairs for units in everyone for unit in units])


def count_states(models: UnitModels, kinds: Sequence[int]) -> list[float]:
    """Build all units of the model; return the bytes of model states for the embedding, each layer and the output."""
    units = _units(kinds)
    states = []
    with undisturbed(), as_one_rank():
        for index in range(len(units)):
            with closing(UnitRun(models, units, index)) as unit_run:
                states.append(unit_run.state_bytes())
    embedding, *of_layers, output = states
    return [embedding, *(of_layers[kind] for kind in kinds), output]


def _units(kinds: Sequence[int]) -> list[Unit]:
    """Return the distinct units of the model, in model order: the embedding, one layer of each kind, and the output."""
    layers = [Unit(layer=kind) for kind in range(max(kinds) + 1)]
    return [Unit(embeds=True), *layers, Unit(is_last=True)]


def _median(measured: Sequence[UnitCosts]) -> UnitCosts:
    values = {
        field.name: statistics.median(getattr(costs, field.name) for costs in measured) for field in fields(UnitCosts)
    }
    return UnitCosts(**values)


def _fused_backward(everyone: Sequence[Sequence[MeasuredUnit]], kinds: Sequence[int]) -> float:
    """Return the time of the model's fused backward, divided by the time of separate B and W."""
    copies = [1, *(kinds.count(kind) for kind in range(max(kinds) + 1)), 1]
    fused = split = 0.0
    for number, replicas in zip(copies, zip(*everyone, strict=True), strict=True):
        fused += number * statistics.median(measured.fused_backward for measured in replicas)
        split += number * statistics.median(measured.split_backward for measured in replicas)
    return fused / split


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random states, and free the memory of models, at the end of the `with` block."""
    random_states, tracker = Restart([]), random.get_cuda_rng_tracker()
    seeds = set(tracker.seeds_)
    try:
        yield
    finally:
        random_states.apply()
        tracker.seeds_ = seeds  # of generators that a unit has added, and that the model will add again
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def as_one_rank() -> Iterator[None]:
    """Let units of the model be built and run as parts of a one-rank pipeline inside the `with` block."""
    virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(1)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual_size)


_PROJECT = "megatron.zero_bubble."


class UnmeasuredError(ValueError):
    """Raised on all ranks if a unit of the model cannot be built, or cannot be run with tokens and labels, on a rank.

    Users may have models that need other inputs, or that cannot have a single layer.
    """


@contextmanager
def _failing_as_unmeasured() -> Iterator[None]:
    """Replace an error in the `with` block by an `UnmeasuredError`, unless this package itself refuses settings."""
    try:
        yield
    except Exception as error:
        *_, (raising, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, ValueError) and raising.f_globals["__name__"].startswith(_PROJECT):
            raise
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise UnmeasuredError(f"the costs of the model cannot be measured: {problem}") from error


def _measure_units(models: UnitModels, units: Sequence[Unit], seconds: float, *, pairs: bool) -> list[MeasuredUnit]:
    """Measure all units of the model. This is a collective call: all ranks run each unit the same number of times.

    Each round runs every unit of the model once, so that a temporary slowdown of the device affects all units. The
    operations of `run_measured` start with cold caches, as in training.
    """
    end = time.perf_counter() + seconds
    with ExitStack() as opened:
        unit_runs: list[UnitRun] = []
        caches = ColdCaches(torch.device(torch.cuda.current_device()))

        @_failing_as_unmeasured()
        def first_pass() -> float:
            """Build and run all units; return the seconds that a pass over them takes."""
            for index in range(len(units)):
                unit_runs.append(opened.enter_context(closing(UnitRun(models, units, index, pairs=pairs))))
            for _ in range(_GAP_PASSES):
                for unit_run in unit_runs:
                    unit_run.run_for_gaps()
            start = time.perf_counter()
            for unit_run in unit_runs:
                unit_run.run_measured(caches, with_memory=True)
                unit_run.run_backwards(caches)
            return time.perf_counter() - start

        seconds_of_pass = jointly(first_pass, _PATIENCE)
        passes = math.floor(min(from_all_ranks((end - time.perf_counter()) / seconds_of_pass)))
        for _ in range(max(0, min(_MOST_PASSES - 1, passes))):
            for unit_run in unit_runs:
                unit_run.run_measured(caches)
                unit_run.run_backwards(caches)
        return [unit_run.costs() for unit_run in unit_runs]
