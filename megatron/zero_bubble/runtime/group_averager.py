"""Averages tensors over groups of replicas, after the iterations that a hierarchy says."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import utils
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

from megatron.zero_bubble.schedule.hierarchy import Hierarchy

_ELEMENTS_AT_ONCE = 40_000_000
"""Elements that are averaged together, unless one tensor has more: torch's averager makes a copy of them."""


def groups_of_replicas(
    places: Sequence[Sequence[int]], sizes: Iterable[int], timeout: timedelta
) -> dict[int, dist.ProcessGroup]:
    """Make this rank's group of each size; a collective call of all ranks of the job.

    torch's averager would make its groups with `new_subgroups`, which every rank has to call with the same ranks. With
    several pipelines, the ranks at the same place in each pipeline are replicas of each other.

    Args:
        places: for each place in a pipeline the global ranks of its replicas, in the same order on all ranks.
        sizes: sizes of groups that divide the number of replicas.
    """
    own: dict[int, dist.ProcessGroup] = {}
    for size in sizes:
        for replicas in places:
            for start in range(0, len(replicas), size):
                ranks = list(replicas[start : start + size])
                group = dist.new_group(ranks, timeout=timeout)
                if dist.get_rank() in ranks:
                    own[size] = group
    return own


class GroupAverager:
    """Averages this rank's tensors with those of other replicas, in place. Other replicas have tensors of equal shapes.

    Args:
        groups: this rank's process group of each size in the hierarchy.
    """

    def __init__(self, hierarchy: Hierarchy, groups: Mapping[int, dist.ProcessGroup]) -> None:
        self._all = groups[hierarchy.num_replicas]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that reducing gradients is cheaper than averaging after each iteration
            self._averager = HierarchicalModelAverager(
                OrderedDict((level.period, hierarchy.num_replicas) for level in hierarchy.levels),
                # torch counts from 0, and averages after the first step that is not of the warm-up.
                warmup_steps=hierarchy.warmup + 1,
                process_group=self._all,
            )
        for level in hierarchy.levels:
            self._averager.period_process_group_dict[level.period] = groups[level.group_size]

    @torch.no_grad()
    def average(self, tensors: Iterable[torch.Tensor], iteration: int) -> None:
        """Average over the largest group whose period divides `iteration`, if there is one."""
        for part in _parts(tensors):
            self._averager.step = iteration
            stand_ins = [_stand_in(tensor) for tensor in part]
            self._averager.average_parameters(stand_ins)
            _copy_back(stand_ins, part)

    @torch.no_grad()
    def average_over_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Average over all replicas, whatever the iteration."""
        for part in _parts(tensors):
            stand_ins = [_stand_in(tensor) for tensor in part]
            utils.average_parameters(iter(stand_ins), self._all)
            _copy_back(stand_ins, part)


def _parts(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split tensors into lists that are averaged together, so that copies of them take little memory."""
    part: list[torch.Tensor] = []
    num_elements = 0
    for tensor in tensors:
        if part and num_elements + tensor.numel() > _ELEMENTS_AT_ONCE:
            yield part
            part, num_elements = [], 0
        part.append(tensor)
        num_elements += tensor.numel()
    if part:
        yield part


def _stand_in(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Make a parameter with the values of `tensor`, for torch's averager, which gives parameters new storage.

    It leaves out a parameter without gradient; the value of the gradient does not matter.
    """
    parameter = torch.nn.Parameter(tensor.detach())
    parameter.grad = tensor.detach()
    return parameter


def _copy_back(stand_ins: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
    for stand_in, tensor in zip(stand_ins, tensors, strict=True):
        if stand_in.data_ptr() != tensor.data_ptr():
            tensor.copy_(stand_in.data)
