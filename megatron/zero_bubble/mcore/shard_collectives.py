"""The groups in which the shards of a vocabulary exchange tensors: a pipeline, and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.zero_bubble.runtime.collectives import Collectives, TorchCollectives


@dataclass(frozen=True)
class ShardCollectives:
    """This rank's groups; they are used by an `ExchangeLane` alone, so they are not megatron-core's."""

    pipeline: Collectives
    tensor: Collectives | None
    """None without tensor parallelism."""

    def gather_statistics(self, statistics: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all shards in their order, [shards, *statistics.shape]."""
        gathered = statistics.new_empty(self.pipeline.size, *statistics.shape)
        self.pipeline.gather_all(statistics, gathered)
        if self.tensor is None:
            return gathered
        of_all = gathered.new_empty(self.tensor.size, *gathered.shape)
        self.tensor.gather_all(gathered, of_all)
        return of_all.flatten(0, 1)

    def sum_to(self, terms: torch.Tensor, root: int, *, splits_sequence: bool) -> torch.Tensor:
        """Return the sum of all shards' terms on the pipeline rank `root`, on other ranks anything.

        The sum over the pipeline ranks comes first, then the sum over the tensor ranks, both in the order of ranks.

        Args:
            terms: [tokens, hidden], changed in place.
            splits_sequence: return a tensor rank's own part of the tokens alone, as sequence parallelism has it.
        """
        self.pipeline.sum_to(terms, root)
        if self.tensor is None or self.pipeline.rank != root:
            return terms
        if splits_sequence:
            parts = terms.chunk(self.tensor.size)
            for rank, part in enumerate(parts):
                self.tensor.sum_to(part, rank)
            # A copy, because a part would keep the whole in memory.
            return parts[self.tensor.rank].clone()
        self.tensor.sum_to(terms, 0)
        self.tensor.broadcast(terms, 0)
        return terms

    def close(self) -> None:
        """Leave the groups; this rank has no collective under way, and any that others have then fails."""
        self.pipeline.close()
        if self.tensor is not None:
            self.tensor.close()


def open_collectives(groups: ProcessGroupCollection, device: torch.device, timeout: timedelta) -> ShardCollectives:
    """Make groups of the same ranks as megatron-core's; a collective call of these ranks."""

    def like(group: dist.ProcessGroup) -> TorchCollectives:
        return TorchCollectives(dist.get_process_group_ranks(group), group.rank(), device, timeout)

    return ShardCollectives(like(groups.pp), like(groups.tp) if groups.tp.size() > 1 else None)


def made_up_collectives(real: ShardCollectives) -> ShardCollectives:
    """Return groups of the same sizes, in which the other ranks send zeros, or what this rank sends."""
    tensor = None if real.tensor is None else _MadeUpRanks(real.tensor)
    return ShardCollectives(_MadeUpRanks(real.pipeline), tensor)


class _MadeUpRanks:
    """Collectives without communication."""

    def __init__(self, real: Collectives) -> None:
        self.rank, self.size = real.rank, real.size

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.rank != root:
            tensor.zero_()

    def gather_all(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(tensor.expand_as(gathered))

    def sum_to(self, tensor: torch.Tensor, root: int) -> None:
        return

    def scatter(self, parts: Sequence[torch.Tensor] | None, part: torch.Tensor, root: int) -> None:
        part.zero_()

    def close(self) -> None:
        return
