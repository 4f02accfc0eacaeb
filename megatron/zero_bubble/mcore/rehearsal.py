"""Rehearses schedules before the model is built: measures training steps of each schedule with small stages.

A rehearsed stage has as many layers of each kind as the stage of the model, but layers of one kind share their weights,
so that a rehearsal needs little memory. A rehearsal uses the executor, messages, recomputation, and the operations and
collectives of vocabulary shards as in training. On a CPU, where computation and communication share cores, a rehearsal
also measures the time for which ranks wait for cores.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model

from megatron.zero_bubble.mcore.checkpointed_blocks import checkpoint_every_layer
from megatron.zero_bubble.mcore.connections import Connections
from megatron.zero_bubble.mcore.model_units import Unit, UnitModels, release
from megatron.zero_bubble.mcore.placement import StagePosition
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.mcore.unit_costs import as_one_rank, undisturbed
from megatron.zero_bubble.mcore.unit_run import clear_losses
from megatron.zero_bubble.mcore.vocabulary_model import shard_vocabulary
from megatron.zero_bubble.planner.request import Layout
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Schedule, StageCosts
from megatron.zero_bubble.schedule.recomputation import Recompute

_INTERLOCKED_STEPS = 2
"""Number of consecutive steps in one measurement if ranks begin a step without waiting for each other; otherwise a
measurement is a single step."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 12
"""Smallest and largest number of measurements of each schedule; the schedules are measured in turn."""


@dataclass(frozen=True)
class Contender:
    """A schedule to rehearse.

    Attributes:
        schedule: a schedule without communication, without copies to the host, and without pairs of F and B.
        costs: the costs of the stages, which determine where the schedule posts its receives.
        layout: the layout of the stages.
        interlocks: whether ranks begin a step without waiting for each other, as with post-validation.
    """

    schedule: Schedule
    costs: StageCosts
    layout: Layout
    interlocks: bool = False

    @property
    def recomputes_layers(self) -> bool:
        """Whether layers are recomputed, either by an R of the schedule or within the backward."""
        return self.layout.recompute is Recompute.FULL or self.schedule.recomputes


def rehearse(
    contenders: Sequence[Contender],
    models: UnitModels,
    kinds: Sequence[int],
    connect: Callable[[], Connections],
    seconds: float,
) -> list[float]:
    """Run schedules in turn and measure the time of a step of each schedule; a collective call of the whole job.

    Args:
        models: builds the units of the model.
        kinds: for each layer of the model, the number of the layer's kind, as in `Unit.layer`.
        connect: function that makes the connections of one schedule.
        seconds: approximate time limit for all steps; every schedule is measured at least three times, even if that
            takes longer.

    Returns:
        One number for each element of `contenders`: the milliseconds of a step on the slowest rank, computed from
        medians over the rounds of measurement.
    """
    with undisturbed(), ExitStack() as opened:
        runs = [
            opened.enter_context(closing(_Rehearsal(contender, models, kinds, connect()))) for contender in contenders
        ]
        for run in runs:
            run.milliseconds(1)
        start = time.perf_counter()
        times = [[run.milliseconds(run.num_steps) for run in runs]]
        fitting = min(from_all_ranks(seconds / (time.perf_counter() - start)))
        num_rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(fitting)))
        times += [[run.milliseconds(run.num_steps) for run in runs] for _ in range(num_rounds - 1)]
    slowest = torch.tensor(from_all_ranks(times), dtype=torch.float64).amax(0)  # [rounds, contenders]
    # The ratios within a round change less than the times, because all contenders share the machine's load.
    ratios = (slowest / slowest.mean(1, keepdim=True)).quantile(0.5, 0)
    return (ratios * slowest.mean(1).quantile(0.5)).tolist()


class _Rehearsal:
    """One rehearsed schedule on this rank, with stages and connections of its own."""

    def __init__(
        self, contender: Contender, models: UnitModels, kinds: Sequence[int], connections: Connections
    ) -> None:
        schedule, layout = contender.schedule, contender.layout
        store = WeightGradStore(schedule.num_chunks)
        with as_one_rank():
            self._stages, self._sources = _build_stages(contender, models, kinds, store)
        if layout.vocabulary_parallel:
            shard_vocabulary(self._stages, layout.placement)
        plan = RunSchedules.of(schedule).requesting(
            costs=contender.costs,
            # Without an R in the schedule, the backward recomputes.
            recomputes=(layout.recompute if schedule.recomputes else Recompute.NONE,),
            vocabulary_parallel=layout.vocabulary_parallel,
        )
        self._run = ForwardBackward(plan, store, connections)
        self.num_steps = _INTERLOCKED_STEPS if contender.interlocks else 1
        self._arguments = models.step_arguments(self._stages, schedule.num_microbatches)

    def milliseconds(self, num_steps: int) -> float:
        """Run consecutive steps; return the mean milliseconds of a step."""
        with as_one_rank():
            dist.barrier(parallel_state.get_pipeline_model_parallel_group())
            start = time.perf_counter()
            for _ in range(num_steps):
                self._run(**self._arguments)
            end = time.perf_counter()
        clear_losses()
        return (end - start) * 1e3 / num_steps

    def close(self) -> None:
        self._run.close()
        release([*self._stages, *self._sources])


def _build_stages(
    contender: Contender, models: UnitModels, kinds: Sequence[int], store: WeightGradStore
) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return this rank's stages for a rehearsal, and the units from which the layers of the stages were taken."""
    placement, partition = contender.layout.placement, contender.layout.partition
    rank = parallel_state.get_pipeline_model_parallel_group().rank()
    layers: dict[int, torch.nn.Module] = {}
    stages, sources = [], []
    for stage in placement.stages_of(rank):
        first_layer = sum(partition[:stage])
        own = kinds[first_layer : first_layer + partition[stage]]
        for kind in {*own} - {*layers}:
            sources.append(models.build(Unit(layer=kind), store))
            [layers[kind]] = unwrap_model(sources[-1]).decoder.layers
        is_last = stage == placement.num_stages - 1
        # A stage between the first and the last has at least one layer.
        unit = Unit(embeds=stage == 0, is_last=is_last) if stage == 0 or is_last else Unit(layer=own[0])
        model = models.build(unit, store)
        stack: Any = unwrap_model(model).decoder
        stack.layers = torch.nn.ModuleList(layers[kind] for kind in own)
        stack.num_layers_per_pipeline_rank = len(own)
        _set_position(model, StagePosition(stage, placement.num_stages))
        stages.append(model)
    _adapt_configs(stages, recomputes=contender.recomputes_layers)
    get_model_config(stages[0]).no_sync_func = [model.no_sync for model in stages]
    return stages, sources


def _adapt_configs(stages: Sequence[torch.nn.Module], *, recomputes: bool) -> None:
    """Set the number of layers and the recomputation in the configurations of the units in `stages`.

    Each unit of the model has its own configuration.
    """
    modules = [module for stage in stages for module in stage.modules()]
    last = max(getattr(module, "layer_number", None) or 0 for module in modules)
    given = (getattr(module, "config", None) for module in modules)
    configs = {id(config): config for config in given if isinstance(config, TransformerConfig)}.values()
    # megatron-core collects the auxiliary losses of experts in one tensor with an entry for each layer; the layers of
    # multi-token prediction have the last entries. The first layer that runs creates the tensor, of the size in its own
    # configuration: the decoder's layers plus the layers of multi-token prediction.
    further = [config.mtp_num_layers or 0 for config in configs]
    size = max(last, *(config.num_layers for config in configs)) + max(further)
    for config, number in zip(configs, further, strict=True):
        config.num_layers = size - number
        if recomputes:
            checkpoint_every_layer(config)


def _set_position(model: torch.nn.Module, position: StagePosition) -> None:
    """Give the `Float16Module` of a model its position in the pipeline.

    `Float16Module` converts only the inputs of the first stage and the outputs of the last stage.
    """
    for module in model.modules():
        if isinstance(module, Float16Module):
            module.pg_collection = copy.copy(module.pg_collection)
            module.pg_collection.pp = position
