"""Measures the times of F, B and W of layers and of stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatron.zero_bubble.pipeline.failures import failing_as
from megatron.zero_bubble.pipeline.forward_state import without_trace
from megatron.zero_bubble.pipeline.messages import StageMessage, clone_tensors
from megatron.zero_bubble.pipeline.specs import call_of, module_of
from megatron.zero_bubble.pipeline.weight_split import split_modules
from megatron.zero_bubble.runtime.profiler import Profiler
from megatron.zero_bubble.runtime.recorder import MeasuredOp, device_clock
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import OpKind, Placement

_RUNS = 6
"""Number of runs of each layer in a measurement; the time of the first run is ignored."""


class LayerTimes(NamedTuple):
    """Times of F, B and W of a layer or stage for one microbatch, in seconds."""

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
    """Return the median times of F, B and W of every layer; the last layer's times include the loss function.

    `measure_layers` copies one layer after the other to `device` and runs the copy. `measure_layers` restores random
    states, so that the training does not change.

    Args:
        example: a pair (inputs, targets) of one microbatch.

    Raises:
        ValueError: a layer or the loss function cannot be copied, or fails during the measurement.
    """
    with without_trace([], device):
        value, targets = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tuple(example))
        times = []
        for index, layer in enumerate(layers):
            module = module_of(layers, index, device)
            with failing_as(f"partition='profile': layer {index} ({type(module).__name__})"):
                module, store = _copied(module).to(device), WeightGradStore()
                split_modules([module], store, split_layers)
                of_layer, value = _measure(call_of(layer, module), value, store, device, needs_input_grad=index > 0)
            times.append(of_layer)
        with failing_as("partition='profile': loss_fn"):
            loss = _copied(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
            of_output = lambda output: loss(output, clone_tensors(targets))  # noqa: E731
            of_loss, _ = _measure(of_output, value, WeightGradStore(), device, needs_input_grad=True)
        return [*times[:-1], LayerTimes(*map(sum, zip(times[-1], of_loss, strict=True)))]


def _copied(module: nn.Module) -> Any:
    """Copy a module, even if one of its attributes is a tensor with an autograd graph, such as a pruned weight."""
    attributes = (value for each in module.modules() for value in vars(each).values())
    computed = [value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf]
    return copy.deepcopy(module, {id(tensor): tensor.detach() for tensor in computed})


def _measure(
    call: Callable[[Any], Any], value: Any, store: WeightGradStore, device: torch.device, *, needs_input_grad: bool
) -> tuple[LayerTimes, Any]:
    """Run a layer several times; return the layer's median times of F, B and W, and the layer's output."""
    clock = device_clock(device)
    message = StageMessage.of(value)
    runs = []
    for run in range(_RUNS):
        inputs = [
            tensor.detach().clone().requires_grad_(needs_input_grad and tensor.is_floating_point())
            for tensor in message.tensors
        ]
        # A copy, because a layer that changes its input in place may not get a leaf of the graph.
        copies = [tensor * 1 if tensor.requires_grad else tensor for tensor in inputs]
        marks = [clock.mark()]
        output = StageMessage.of(call(message.spec.value_of(copies)))
        marks.append(clock.mark())
        with store.deferring():
            grads = [torch.ones_like(tensor) for tensor in output.tensors]
            output.backward(grads)
        store.flush(0, run)
        marks.append(clock.mark())
        store.pop(0, run)
        marks.append(clock.mark())
        start, after_f, after_b, after_w = clock.seconds(marks)
        runs.append(LayerTimes(after_f - start, after_b - after_f, after_w - after_b))
    return LayerTimes(*map(median, zip(*runs[1:], strict=True))), output.detach().value


def stage_times(ops: Sequence[MeasuredOp], placement: Placement, rank: int) -> dict[int, LayerTimes]:
    """Compute the median times of F, B and W on each stage of `rank` from the measured operations of a step.

    `time_b` includes the time of R and, in schedules that do not split the backward, the time of W.
    """
    profiler = Profiler(placement, rank)
    profiler.add(ops)
    times_of = {}
    for costs in profiler.costs():
        seconds = {kind: milliseconds / 1000 for kind, milliseconds in costs.times.items()}
        backward = sum(seconds.get(kind, 0.0) for kind in (OpKind.B, OpKind.BW, OpKind.R))
        times_of[costs.stage] = LayerTimes(seconds[OpKind.F], backward, seconds.get(OpKind.W, 0.0))
    return times_of
