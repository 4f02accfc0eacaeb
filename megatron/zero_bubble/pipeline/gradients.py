"""Processes gradients after a step: sums over tied copies, means over replicas, and clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from megatron.zero_bubble.pipeline.held_layers import HeldLayers, stages_of_ties
from megatron.zero_bubble.pipeline.interconnect import Agreement, Interconnect
from megatron.zero_bubble.pipeline.stage_layout import StageLayout
from megatron.zero_bubble.runtime.collectives import Collectives
from megatron.zero_bubble.schedule import Placement


class TiedLayer:
    """Keeps the copies of a tied layer equal: all copies start with the first copy's weights and get equal gradients.

    Creating a `TiedLayer` is a collective call of the ranks that hold a copy of the layer.

    Args:
        stages: the stages that have a copy of the layer, in ascending order; several of these stages may be on one
            rank.
        own: stage -> the module of the layer's copy, for the stages of this rank.
    """

    def __init__(
        self,
        stages: Sequence[int],
        own: Mapping[int, torch.nn.Module],
        placement: Placement,
        interconnect: Interconnect,
    ) -> None:
        self._stages = stages
        self._modules = own
        members = sorted({placement.rank_of(stage) for stage in stages})
        self._roots = {stage: members.index(placement.rank_of(stage)) for stage in stages}
        self._collectives: Collectives | None = None
        if len(members) > 1:
            self._collectives = interconnect.collectives(members, interconnect.device)
        self._before: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._copy_first()

    @property
    def _own(self) -> dict[int, list[torch.nn.Parameter]]:
        """The current parameters of each copy of the layer, by stage.

        The parameters are read at each access, because `load_state_dict(..., assign=True)` replaces parameters.
        """
        return {stage: list(module.parameters()) for stage, module in self._modules.items()}

    @torch.no_grad()
    def _copy_first(self) -> None:
        for k in range(self._num_parameters):
            value = self._broadcast(self._stages[0], self._contiguous_copy(self._stages[0], k))
            for copy in self._own.values():
                copy[k].copy_(value)

    @property
    def parameters_beyond_first(self) -> set[torch.nn.Parameter]:
        """The parameters of this rank that are copies of parameters on an earlier stage."""
        return {parameter for stage, copy in self._own.items() if stage != self._stages[0] for parameter in copy}

    @property
    def _num_parameters(self) -> int:
        return len(next(iter(self._own.values())))

    def begin_step(self) -> None:
        """Set aside the gradients of earlier steps, which are already sums over all copies of the layer."""
        self._before = {parameter: parameter.grad for copy in self._own.values() for parameter in copy}
        for parameter in self._before:
            parameter.grad = None

    @torch.no_grad()
    def end_step(self) -> None:
        """Give every copy the sum of all copies' gradients of this step, added in the order of the stages.

        If no copy has a gradient of this step for a parameter, the parameter keeps its gradient of earlier steps.
        """
        for k, has_gradient in enumerate(self._has_gradient()):
            if has_gradient:
                first, *others = (
                    self._broadcast(stage, self._contiguous_copy(stage, k, of_gradient=True)) for stage in self._stages
                )
                total = sum(others, start=first)
            for copy in self._own.values():
                before = self._before[copy[k]]
                if has_gradient:
                    before = total.clone() if before is None else before.add_(total)
                copy[k].grad = before
        self._before = {}

    def _has_gradient(self) -> list[bool]:
        """Return for each parameter whether any copy of the tied layer has a gradient; a collective call."""
        copies = [[copy[k] for copy in self._own.values()] for k in range(self._num_parameters)]
        own = [any(parameter.grad is not None for parameter in of_one) for of_one in copies]
        if self._collectives is None or not own:
            return own
        flags = torch.tensor(own, dtype=torch.int32).to(copies[0][0].device, non_blocking=True)
        of_ranks = flags.new_empty(self._collectives.size, len(own))
        self._collectives.gather_all(flags, of_ranks)
        if all(has or not of_one[0].requires_grad for has, of_one in zip(own, copies, strict=True)):
            return own  # because reading the flags waits for the device
        return [bool(has) for has in of_ranks.any(0).tolist()]

    def _contiguous_copy(self, stage: int, k: int, *, of_gradient: bool = False) -> torch.Tensor:
        """Return a contiguous copy of parameter `k` on a stage or, with `of_gradient`, of the parameter's gradient.

        If this rank does not have the stage or the gradient, the result is zeros.
        """
        result = torch.zeros_like(next(iter(self._own.values()))[k], memory_format=torch.contiguous_format)
        if stage in self._own:
            value = self._own[stage][k].grad if of_gradient else self._own[stage][k]
            if value is not None:
                result.copy_(value)
        return result

    def _broadcast(self, stage: int, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast `tensor` from the rank of `stage` to all ranks that hold a copy of the layer; return `tensor`.

        If one rank holds all copies of the tied layer, nothing is sent.
        """
        if self._collectives is not None:
            self._collectives.broadcast(tensor, self._roots[stage])
        return tensor


def connect_ties(
    layers: Sequence[Any], layout: StageLayout, held: HeldLayers, interconnect: Interconnect
) -> list[TiedLayer]:
    """Connect this rank's copies of layers that are tied across stages, in the same order on all ranks."""
    return [
        TiedLayer(stages, held.tied[key], layout.schedule.placement, interconnect)
        for key, stages in stages_of_ties(layers, layout).items()
        if key in held.tied and len(stages) > 1
    ]


def average_over(replicas: dist.ProcessGroup, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients over replicas as DistributedDataParallel does: divide each gradient first, then sum.

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
    if not all(has_gradient):  # only then, because reading the counts waits for the device
        for parameter, count in zip(trained, counts.tolist(), strict=True):
            if count == 0:
                parameter.grad = None


LayerNorm = tuple[int, torch.dtype, torch.Tensor]
"""(index of a layer, type of a gradient of the layer, norm of this gradient); the norm is on the host."""


def own_norms(counted: Sequence[tuple[int, torch.nn.Parameter]], norm_type: float = 2.0) -> list[LayerNorm]:
    """Return the norms of this rank's gradients, computed by the same functions as in `torch.nn.utils.get_total_norm`.

    Args:
        counted: the parameters without a copy on an earlier stage, each with its layer's index, in model order.
    """
    grads = [(layer, _values(parameter.grad)) for layer, parameter in counted if parameter.grad is not None]
    norms: dict[int, torch.Tensor] = {}
    for indices in _groups([values for _, values in grads]):
        group = [grads[k][1] for k in indices]
        has_foreach = _has_foreach_support(group, group[0].device)
        alone = partial(torch.linalg.vector_norm, ord=norm_type)
        of_group = torch._foreach_norm(group, norm_type) if has_foreach else map(alone, group)
        norms.update(zip(indices, of_group, strict=True))
    return [(layer, values.dtype, norms[k].cpu()) for k, (layer, values) in enumerate(grads)]


def _groups(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Group tensors by device and type, ordered as in `torch.nn.utils.get_total_norm`; return each group's indices."""
    groups = _group_tensors_by_device_and_dtype([[*tensors]], with_indices=True) if tensors else {}
    return [indices for _, indices in groups.values()]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return a non-empty dense tensor whose norm equals the norm of the gradient."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    # An empty tensor has no largest value.
    return values if values.numel() else values.new_zeros(1)


def total_norm(norms: Sequence[LayerNorm], device: torch.device, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all ranks' gradients, equal bit by bit to the norm in a single process.

    The gradients' norms are combined on `device`, in the order of `torch.nn.utils.get_total_norm`: by type, then in the
    order of the model's parameters.
    """
    if not norms:
        return torch.tensor(0.0)
    in_order = sorted(norms, key=lambda entry: entry[0])
    groups = _groups([torch.empty(0, dtype=dtype) for _, dtype, _ in in_order])
    by_type = torch.stack([in_order[k][2] for indices in groups for k in indices])
    return torch.linalg.vector_norm(by_type.to(device), norm_type)


def clip_grad_norm(
    parameters: Sequence[torch.nn.Parameter],
    counted: Sequence[tuple[int, torch.nn.Parameter]],
    agreement: Agreement,
    device: torch.device,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale this rank's gradients so that all ranks' gradient norm is at most `max_norm`; return the unscaled norm.

    Args:
        parameters: all parameters of this rank.
        counted: the parameters without a copy on an earlier stage, each with its layer's index, in model order.
        device: the device of the gradients, on which the norm is computed.
    """
    of_all = [entry for entries in agreement.gather(own_norms(counted, norm_type)) for entry in entries]
    total = total_norm(of_all, device, norm_type)
    if of_all:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
