"""Runs collective operations (broadcast, gather, reduce) among the ranks of a group.

All ranks of a group call the same collectives in the same order. On a CPU, a collective blocks the calling thread; on a
GPU, a collective blocks the current stream. An `ExchangeLane` overlaps collectives with computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.process_group import Membership, connect


class Collectives(Protocol):
    """Runs collective operations in a group of ranks. The caller allocates all tensors, which must be contiguous."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` on all ranks with the values of `tensor` on rank `root`."""

    def gather_all(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        """Fill `gathered[r]` on all ranks with `tensor` of rank r."""

    def sum_to(self, tensor: torch.Tensor, root: int) -> None:
        """Replace `tensor` on rank `root` by the sum of `tensor` over all ranks; on other ranks, keep `tensor`.

        On a CPU the tensors are added in the order of the ranks, so that the sum is bitwise reproducible.
        """

    def close(self) -> None:
        """Leave the group, so that later collectives of the other ranks fail.

        `close` must not be called while a collective runs on this rank.
        """


class TorchCollectives:
    """Runs collectives over torch.distributed, in a process group that only the members of the group create.

    Args:
        members: global ranks of the group, the same on every rank.
        rank: this process's index in `members`.
        device: device of the tensors that the collectives send.
        timeout: time after which a collective fails if a rank does not take part.
    """

    def __init__(self, members: Sequence[int], rank: int, device: torch.device, timeout: timedelta) -> None:
        name = f"megatron.zero_bubble/collectives of {','.join(map(str, members))}"
        self._group: Any = connect(Membership(name, tuple(members), rank, device, timeout))
        self.rank, self.size = rank, len(members)
        self._reduces = device.type == "cuda"
        self._open(device)

    @classmethod
    def like(cls, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> TorchCollectives:
        """Create a new process group with the ranks of `group`; a collective call of these ranks."""
        return cls(dist.get_process_group_ranks(group), group.rank(), device, timeout)

    def _open(self, device: torch.device) -> None:
        """Run each collective once with each root, because NCCL connects ranks only when they first communicate."""
        mine = torch.full((1,), float(self.rank), device=device)
        everyone = torch.empty(self.size, 1, device=device)
        self.gather_all(mine, everyone)
        assert everyone.flatten().tolist() == list(range(self.size)), "two groups of collectives are crossed"
        for root in range(self.size):
            self.broadcast(everyone, root)
            self.sum_to(mine.clone(), root)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._group.broadcast(tensor, root).wait()

    def gather_all(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        # The tensors are flattened, because gloo requires both tensors to have equally many dimensions.
        self._group._allgather_base(gathered.view(-1), tensor.view(-1)).wait()

    def sum_to(self, tensor: torch.Tensor, root: int) -> None:
        if self._reduces:
            self._group.reduce(tensor, root).wait()
            return
        gather = dist.GatherOptions()
        gather.rootRank = root
        is_root = self.rank == root
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if is_root else []
        self._group.gather([parts] if is_root else [], [tensor], gather).wait()
        if is_root:
            sum_in_order(parts, tensor)

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        self._group = None  # gloo closes its connections when the group is deleted


def sum_in_order(parts: Sequence[torch.Tensor] | torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Add `parts` one after the other in the given order, write the sum to `result`, and return `result`."""
    result.copy_(parts[0])
    for part in parts[1:]:
        result += part
    return result
