"""Measures the times of F, B and W of single layers, to balance a partition, and of stages in a running pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.zero_bubble.pipeline.graph_backward import run_backward
from megatron.zero_bubble.pipeline.messages import StageMessage, clone_tensors
from megatron.zero_bubble.pipeline.specs import built, call_of
from megatron.zero_bubble.pipeline.weight_split import split_modules
from megatron.zero_bubble.runtime.profiler import Profiler
from megatron.zero_bubble.runtime.recorder import MeasuredOp, device_clock
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import OpKind, Placement
from megatron.zero_bubble.schedule.errors import one_line

_RUNS = 6
"""Number of runs of each layer in a measurement; the time of the first run is ignored."""


class LayerTimes(NamedTuple):
    """Seconds that a layer takes for one microbatch."""

    time_f: float
    time_b: float
    time_w: float


def measure_layers(
    layers: Sequence[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    example: tuple[Any, Any],
    device: torch.device,
    split_layers: Sequence[type[nn.Module]] = (),
) -> list[LayerTimes]:
    """Return the median times of every layer; the times of the loss are added to the times of the last layer.

    `measure_layers` runs copies of the layers, one copy at a time, so that the layers themselves do not change.

    Args:
        example: inputs and targets of one microbatch.

    Raises:
        ValueError: a layer or the loss cannot be copied, or fails while it is measured.
    """
    value, targets = example
    times = []
    for index in range(len(layers) + 1):
        is_loss = index == len(layers)
        module = nn.Identity() if is_loss else built(layers, index, device)
        store = WeightGradStore()
        call: Callable[[Any], Any]
        try:
            if is_loss:
                call = partial(_loss, _copied(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn, targets)
            else:
                module = _copied(module)
                call = call_of(layers[index], module)
                split_modules([module], store, split_layers)
            of_layer, value = _measure(call, value, store, device, needs_input_grad=index > 0)
        except Exception as error:
            name = "loss_fn" if is_loss else f"layer {index} ({type(module).__name__})"
            raise ValueError(
                f"partition='profile': {name} failed: {type(error).__name__}: {one_line(error)}"
            ) from error
        times.append(of_layer)
    *of_layers, of_last, of_loss = times
    return [*of_layers, LayerTimes(*map(sum, zip(of_last, of_loss, strict=True)))]


def _loss(loss_fn: Callable[[Any, Any], torch.Tensor], targets: Any, output: Any) -> torch.Tensor:
    return loss_fn(output, clone_tensors(targets))


def _copied(module: nn.Module) -> Any:
    """Copy a module, even if it keeps a tensor that belongs to an autograd graph, such as a pruned weight."""
    attributes = (value for each in module.modules() for value in vars(each).values())
    computed = [value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf]
    return copy.deepcopy(module, {id(tensor): tensor.detach() for tensor in computed})


def _measure(
    call: Callable[[Any], Any], value: Any, store: WeightGradStore, device: torch.device, *, needs_input_grad: bool
) -> tuple[LayerTimes, Any]:
    """Run a layer several times; return its times and its output."""
    clock = device_clock(device)
    given = StageMessage.of(value)
    runs = []
    for run in range(_RUNS):
        inputs = [
            tensor.detach().clone().requires_grad_(needs_input_grad and tensor.is_floating_point())
            for tensor in given.tensors
        ]
        # A copy, because a layer that changes its input in place may not get a leaf of the graph.
        copies = [tensor * 1 if tensor.requires_grad else tensor for tensor in inputs]
        marks = [clock.mark()]
        output = StageMessage.of(call(given.spec.value_of(copies)))
        marks.append(clock.mark())
        with store.deferring():
            grads = [torch.ones_like(tensor) for tensor in output.tensors]
            run_backward(*output.backward_from(grads), accumulates=True)
        store.flush(0, run)
        marks.append(clock.mark())
        store.pop(0, run)
        marks.append(clock.mark())
        start, after_f, after_b, after_w = clock.seconds(marks)
        runs.append(LayerTimes(after_f - start, after_b - after_f, after_w - after_b))
    return LayerTimes(*map(median, zip(*runs[1:], strict=True))), output.detach().value


def stage_times(ops: Sequence[MeasuredOp], placement: Placement, rank: int) -> dict[int, LayerTimes]:
    """Return the median times of one microbatch for each stage of `rank`, from the measured operations of a step.

    In the returned times, `time_b` includes the time of R, and the time of BW, which computes B and W together.
    """
    profiler = Profiler(placement, rank)
    profiler.add(ops)
    times_of = {}
    for costs in profiler.costs():
        seconds = {kind: milliseconds / 1000 for kind, milliseconds in costs.times.items()}
        backward = sum(seconds.get(kind, 0.0) for kind in (OpKind.B, OpKind.BW, OpKind.R))
        times_of[costs.stage] = LayerTimes(seconds[OpKind.F], backward, seconds.get(OpKind.W, 0.0))
    return times_of
