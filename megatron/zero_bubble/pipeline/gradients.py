"""Sums gradients over the copies of tied layers, averages gradients over replicas, and computes gradient norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from megatron.zero_bubble.pipeline.held_layers import HeldLayers
from megatron.zero_bubble.pipeline.interconnect import Interconnect
from megatron.zero_bubble.pipeline.specs import tie_of
from megatron.zero_bubble.pipeline.stage_layout import StageLayout
from megatron.zero_bubble.runtime.collectives import Collectives
from megatron.zero_bubble.schedule import Placement


class TiedLayer:
    """Keeps the copies of a tied layer equal: all copies get the same initial weights and equal gradients.

    Creating a `TiedLayer` is a collective call of the ranks that hold a copy of the layer.

    Args:
        stages: the stages that have a copy of the layer, in ascending order; several of these stages may be on one
            rank.
        modules: stage of this rank -> module that is the stage's copy of the tied layer.
    """

    def __init__(
        self,
        stages: Sequence[int],
        modules: Mapping[int, torch.nn.Module],
        placement: Placement,
        interconnect: Interconnect,
    ) -> None:
        self._stages, self._modules = stages, modules
        members = sorted({placement.rank_of(stage) for stage in stages})
        self._roots = {stage: members.index(placement.rank_of(stage)) for stage in stages}
        self._collectives: Collectives | None = None
        if len(members) > 1:
            self._collectives = interconnect.collectives(members, interconnect.device)
        self._before: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self.equalize()

    @torch.no_grad()
    def equalize(self) -> None:
        """Give all copies the weights of the copy on the first stage; a collective call of the ranks with a copy."""
        first = self._stages[0]
        for copies in self._copies():
            value = self._broadcast(first, copies, copies.get(first))
            for parameter in copies.values():
                parameter.copy_(value)

    def _copies(self) -> list[dict[int, torch.nn.Parameter]]:
        """Return one dict for each parameter of the tied layer: stage of this rank -> the stage's copy.

        Each call reads the parameters from the modules, because `load_state_dict(..., assign=True)` replaces
        parameters.
        """
        parameters = zip(*(module.parameters() for module in self._modules.values()), strict=True)
        return [dict(zip(self._modules, copies, strict=True)) for copies in parameters]

    def parameters_beyond_first(self) -> set[torch.nn.Parameter]:
        """Return this rank's parameters that are copies of parameters on the layer's first stage."""
        first = self._stages[0]
        return {parameter for copies in self._copies() for stage, parameter in copies.items() if stage != first}

    def begin_step(self) -> None:
        """Move earlier steps' gradients out of `.grad`: these gradients are already summed over the layer's copies."""
        self._before = {parameter: parameter.grad for copies in self._copies() for parameter in copies.values()}
        for parameter in self._before:
            parameter.grad = None

    @torch.no_grad()
    def end_step(self) -> None:
        """Sum this step's gradients over all copies of the tied layer, in stage order, and give each copy the sum.

        For every copy of a parameter, `.grad` becomes the parameter's gradient of earlier steps plus the sum of this
        step's gradients. If no copy of a parameter has a gradient from this step, `.grad` becomes the parameter's
        gradient of earlier steps.
        """
        parameters = self._copies()
        for copies, has_gradient in zip(parameters, self._has_gradient(parameters), strict=True):
            if has_gradient:
                grads = {stage: parameter.grad for stage, parameter in copies.items()}
                first, *others = (self._broadcast(stage, copies, grads.get(stage)) for stage in self._stages)
                total = sum(others, start=first)
            for parameter in copies.values():
                before = self._before[parameter]
                if has_gradient:
                    before = total.clone() if before is None else before.add_(total)
                parameter.grad = before
        self._before = {}

    def _has_gradient(self, parameters: list[dict[int, torch.nn.Parameter]]) -> list[bool]:
        """Return one flag for each parameter of the tied layer: whether any copy has a gradient; a collective call."""
        own_flags = [any(parameter.grad is not None for parameter in copies.values()) for copies in parameters]
        if self._collectives is None or not own_flags:
            return own_flags
        firsts = [next(iter(copies.values())) for copies in parameters]
        flags = torch.tensor(own_flags, dtype=torch.int32).to(firsts[0].device, non_blocking=True)
        of_ranks = flags.new_empty(self._collectives.size, len(own_flags))
        self._collectives.gather_all(flags, of_ranks)
        if all(flag or not parameter.requires_grad for flag, parameter in zip(own_flags, firsts, strict=True)):
            return own_flags  # the flags are not read, because this waits for the device
        return [bool(flag) for flag in of_ranks.any(0).tolist()]

    def _broadcast(self, stage: int, copies: dict[int, torch.nn.Parameter], value: torch.Tensor | None) -> torch.Tensor:
        """Broadcast a weight or gradient from `stage`'s rank to all ranks that hold a copy; None is sent as zeros."""
        result = torch.zeros_like(next(iter(copies.values())), memory_format=torch.contiguous_format)
        if value is not None:
            result.copy_(value)
        if self._collectives is not None:
            self._collectives.broadcast(result, self._roots[stage])
        return result


def connect_ties(
    layers: Sequence[Any], layout: StageLayout, held: HeldLayers, interconnect: Interconnect
) -> list[TiedLayer]:
    """Create a `TiedLayer` for each layer that is tied across stages and has a copy on this rank.

    All ranks create the instances of `TiedLayer` in the same order.
    """
    placement = layout.schedule.placement
    stages_of: dict[str, list[int]] = defaultdict(list)
    for stage in range(placement.num_stages):
        for key in {key for index in layout.layers_of(stage) if (key := tie_of(layers[index])) is not None}:
            stages_of[key].append(stage)
    return [
        TiedLayer(stages, held.tied[key], placement, interconnect)
        for key, stages in sorted(stages_of.items())
        if key in held.tied and len(stages) > 1
    ]


def average_over(replicas: dist.ProcessGroup, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients over replicas as DistributedDataParallel does: divide by the number of replicas, then sum.

    If no replica has a gradient for a parameter, the parameter gets no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    has_gradient = [parameter.grad is not None for parameter in trained]
    counts = torch.tensor(has_gradient, dtype=torch.int32).to(trained[0].device, non_blocking=True)
    works = [dist.all_reduce(counts, group=replicas, async_op=True)]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(replicas.size())
        works.append(dist.all_reduce(parameter.grad, group=replicas, async_op=True))
    for work in works:
        work.wait()
    if not all(has_gradient):  # reads the counts only if needed: this waits for the device
        for parameter, count in zip(trained, counts.tolist(), strict=True):
            if count == 0:
                parameter.grad = None


LayerNorm = tuple[int, torch.dtype, torch.Tensor]
"""(index of a layer, data type of one of the layer's gradients, norm of this gradient); the norm is on the host."""


def own_norms(counted: Sequence[tuple[int, torch.nn.Parameter]], norm_type: float = 2.0) -> list[LayerNorm]:
    """Return the norm of each gradient of this rank, computed as in `torch.nn.utils.get_total_norm`.

    Args:
        counted: pairs (index of a layer, parameter of the layer), in the order of the model. A parameter of a tied
            layer is listed only on the first stage with a copy of the layer.
    """
    grads = [(layer, _values(parameter.grad)) for layer, parameter in counted if parameter.grad is not None]
    norms: dict[int, torch.Tensor] = {}
    for indices in _groups([values for _, values in grads]):
        group = [grads[k][1] for k in indices]
        has_foreach = _has_foreach_support(group, group[0].device)
        alone = partial(torch.linalg.vector_norm, ord=norm_type)
        of_group = torch._foreach_norm(group, norm_type) if has_foreach else map(alone, group)
        # Copied to the host together, because every copy waits for the device.
        norms.update(zip(indices, torch.stack([unsharded(norm) for norm in of_group]).cpu().unbind(), strict=True))
    return [(layer, values.dtype, norms[k]) for k, (layer, values) in enumerate(grads)]


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor if `fully_shard` has sharded it, in a collective call of the ranks with shards."""
    # Without `isinstance`, because importing DTensor takes time.
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _groups(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Group tensors by device and data type as in `torch.nn.utils.get_total_norm`; return the indices of each group."""
    groups = _group_tensors_by_device_and_dtype([[*tensors]], with_indices=True) if tensors else {}
    return [indices for _, indices in groups.values()]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return a non-empty dense tensor whose norm equals the norm of `gradient`."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    # An empty tensor has no largest value.
    return values if values.numel() else values.new_zeros(1)


def total_norm(norms: Sequence[LayerNorm], device: torch.device, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all ranks' gradients, bitwise equal to the norm in training with one process.

    The total norm is computed on `device` from the norms of the individual gradients, in the same order as in
    `torch.nn.utils.get_total_norm`: by data type, and within a data type in the order of the model's parameters.
    """
    if not norms:
        return torch.tensor(0.0)
    in_order = sorted(norms, key=lambda entry: entry[0])
    groups = _groups([torch.empty(0, dtype=dtype) for _, dtype, _ in in_order])
    by_type = torch.stack([in_order[k][2] for indices in groups for k in indices])
    return torch.linalg.vector_norm(by_type.to(device), norm_type)
