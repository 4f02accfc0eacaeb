"""Decides which layers each stage of a pipeline gets, and which schedule the ranks of the pipeline run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from megatron.zero_bubble.pipeline import boundaries
from megatron.zero_bubble.pipeline.layer_costs import LayerTimes, measure_layers
from megatron.zero_bubble.pipeline.options import PipelineOptions
from megatron.zero_bubble.pipeline.shared_state import refuse_shared
from megatron.zero_bubble.pipeline.specs import LayerSpec, built_on_meta, class_name_of, refuse_unusable
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import Schedule, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs, with_host_link
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.recomputation import Recompute


@dataclass(frozen=True)
class StageLayout:
    """The layers of every stage, and the schedule that runs the stages."""

    boundaries: boundaries.Boundaries
    """Index of the first layer of every stage, followed by the model's number of layers."""
    loads: tuple[float, ...]
    """Stage -> load of the stage's layers, in the unit `unit` (layers, parameters, matching layers or seconds)."""
    unit: str
    schedule: Schedule
    """A valid schedule that includes the operations for messages between ranks."""

    def layers_of(self, stage: int) -> range:
        return range(self.boundaries[stage], self.boundaries[stage + 1])


@dataclass(frozen=True)
class LayoutRequest:
    """A request for a `StageLayout`; a field named like an argument of `Pipeline` has the meaning of that argument."""

    layers: Sequence[Any]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    schedule: str | Schedule
    num_microbatches: int
    options: PipelineOptions
    num_ranks: int
    device: torch.device

    def layout(self) -> StageLayout:
        """Choose the layers of every stage and plan the schedule.

        Raises:
            ValueError: there are fewer layers than stages, or the partition or the schedule cannot be made.
        """
        plan, partition, num_layers = self._schedules(), self.options.partition, len(self.layers)
        placement = plan.placement
        if num_layers < placement.num_stages:
            raise ValueError(
                f"{num_layers} layers are too few for {placement.num_stages} stages, which schedule {plan.name} "
                f"has on {placement.num_ranks} ranks"
            )
        times = None
        if partition == "profile":
            if (example := self.options.example) is None:
                raise ValueError(
                    "partition='profile' needs example=(inputs, targets), one microbatch to measure layers with"
                )
            times = measure_layers(self.layers, self.loss_fn, example, self.device, self.options.split_layers)
        weights, unit = self._weights(times)
        if isinstance(partition, str):
            stages = boundaries.balanced(weights, placement.num_stages)
        else:
            stages = boundaries.given(partition, num_layers, placement.num_stages)
        refuse_shared(self.layers, stages)
        costs = default_costs(placement, plan.recompute)
        if times is not None:
            costs = _stage_costs(times, stages, costs)
        if self.options.offload is not None:
            costs = with_host_link(costs, self.options.offload * placement.num_ranks / sum(costs.time_f))
        plan = plan.requesting(costs=costs, offloads=self.options.offload is not None)
        loads = tuple(sum(weights[first:end]) for first, end in pairwise(stages))
        return StageLayout(stages, loads, unit, plan.schedule(self.num_microbatches))

    def _schedules(self) -> RunSchedules:
        """Return the `RunSchedules` for the field `schedule`, which is a `Schedule` or the name of a schedule."""
        schedule = self.schedule
        if isinstance(schedule, str):
            plan = RunSchedules.named(schedule, self.num_ranks, self.options.num_chunks)
        elif schedule.num_ranks != self.num_ranks:
            raise ValueError(
                f"schedule {schedule.name} is for {schedule.num_ranks} ranks, but the pipeline has {self.num_ranks}"
            )
        else:
            for name in ("num_chunks", "memory_limit"):
                if (value := getattr(self.options, name)) is not None:
                    raise ValueError(
                        f"{name}={value}: schedule {schedule.name} is already made: give {name} to the function that "
                        "makes the schedule, or give the schedule's name"
                    )
            plan = RunSchedules.of(schedule)
        if self.options.offload is not None and not plan.adapts:
            raise ValueError(f"offload needs a planned schedule, and {plan.name} is not planned: use schedule='auto'")
        specs = ((index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, LayerSpec))
        checkpointed = [index for index, spec in specs if spec.checkpoint]
        if self.options.offload is not None and checkpointed:
            raise ValueError(
                f"offload and checkpoint=True of layer {checkpointed[0]}: nothing that is recomputed is copied, so "
                "leave one out"
            )
        recompute = Recompute.FULL if self.options.checkpoint or checkpointed else Recompute.NONE
        return plan.requesting(memory_limit=self.options.memory_limit, recomputes=(recompute,))

    def _weights(self, times: list[LayerTimes] | None) -> tuple[Sequence[float], str]:
        """Return the load of every layer, and the unit of the loads."""
        if times is not None:
            return [sum(of_layer) for of_layer in times], "s a microbatch"
        partition = self.options.partition
        if partition == "parameters":
            return [num_parameters(*entry) for entry in enumerate(self.layers)], "parameters"
        if partition == "uniform" or not isinstance(partition, str):
            return [1] * len(self.layers), "layers"
        kind, _, pattern = partition.partition(":")
        if kind != "type" or not pattern:
            raise ValueError(
                f"partition={partition!r} is unknown: use 'uniform', 'parameters', 'type:REGEX', 'profile' or a "
                "list of boundaries"
            )
        return boundaries.matching(pattern, [class_name_of(layer) for layer in self.layers]), "matching layers"


def num_parameters(index: int, layer: Any) -> int:
    """Count the parameters of layer `index`; a `LayerSpec` is built on the meta device, which takes no memory."""
    if isinstance(layer, LayerSpec):
        try:
            layer = built_on_meta(layer)
        except Exception as error:
            raise ValueError(
                f"the parameters of {layer.class_name} cannot be counted, because it cannot be built on the meta "
                f"device ({one_line(error)}): choose another partition than 'parameters'"
            ) from error
    refuse_unusable(index, layer)
    return sum(parameter.numel() for parameter in layer.parameters()) if isinstance(layer, nn.Module) else 0


def _stage_costs(times: Sequence[LayerTimes], stages: boundaries.Boundaries, unmeasured: StageCosts) -> StageCosts:
    """Replace the times in the costs `unmeasured` by measured times in seconds.

    The time of F, B or W of a stage is the sum of the times of the stage's layers. If `unmeasured` has times of R, the
    time of R of a stage is set to the stage's time of F.
    """
    sums = [LayerTimes(*map(sum, zip(*times[first:end], strict=True))) for first, end in pairwise(stages)]
    # The time of an operation in a schedule must be above zero.
    time_f, time_b, time_w = (tuple(max(1e-9, value) for value in column) for column in zip(*sums, strict=True))
    time_r = time_f if any(unmeasured.time_r) else unmeasured.time_r
    return replace(unmeasured, time_f=time_f, time_b=time_b, time_w=time_w, time_r=time_r)
