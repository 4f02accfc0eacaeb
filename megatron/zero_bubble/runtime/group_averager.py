"""Averages tensors over groups of pipeline replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

_ELEMENTS_AT_ONCE = 40_000_000
"""Largest number of elements that one reduction copies and averages, unless a single tensor has more elements."""


def groups_of_replicas(
    places: Sequence[Sequence[int]], sizes: Iterable[int], timeout: timedelta
) -> dict[int, dist.ProcessGroup]:
    """Return this rank's process group of replicas for each group size; a collective call of all ranks of the job.

    With several pipelines, the ranks at the same position in each pipeline are replicas of each other.

    Args:
        places: for each rank of a pipeline, the global ranks of all replicas of this rank; the same on all ranks.
        sizes: sizes of the groups; each size divides the number of replicas.
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


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by their means over a group of replicas; a collective call of the group.

    As in torch's averagers, each tensor is divided by the group's size before the sum.

    Args:
        tensors: tensors of the same shapes on all ranks of `group`.
    """
    for part in _parts(tensors):
        mean = torch.cat([tensor.reshape(-1) for tensor in part]).div_(group.size())
        dist.all_reduce(mean, group=group)
        for tensor, values in zip(part, mean.split([tensor.numel() for tensor in part]), strict=True):
            tensor.copy_(values.view_as(tensor))


def _parts(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split tensors into lists of limited total size, because averaging a list copies all tensors of the list."""
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
