"""Creates a process group of some ranks of a job, without a call by the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Membership:
    """The arguments with which one member of a process group creates the group."""

    name: str
    members: tuple[int, ...]
    """Global ranks of all members, the same on every member."""
    rank: int
    """Index of this member in `members`."""
    device: torch.device
    timeout: timedelta


def connect(membership: Membership) -> Any:
    """Create a member's `ProcessGroupNCCL` or `ProcessGroupGloo`; the members find each other in the job's store.

    `connect` does not use `dist.new_group`, which every rank of the job would have to call for every group. With
    `use_local_synchronization`, only the members call `dist.new_group`, but torch's name for the group contains the
    number of groups that the caller has created. Members that have created different numbers of groups would use
    different names, and would wait for each other forever.
    """
    rank, size = membership.rank, len(membership.members)
    store = new_store(membership.name, rank)
    if membership.device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, size, _nccl_options(membership))
    return dist.ProcessGroupGloo(store, rank, size, membership.timeout)


def new_store(name: str, rank: int) -> dist.Store:
    """Return a part of the job's store in which no member has a key yet; all members of `name` call it equally often.

    Each member counts its calls, so that the keys of a second call are not the keys of the first call.
    """
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return dist.PrefixStore(str(store.add(f"generation of {rank}", 1)), store)


def _nccl_options(membership: Membership) -> Any:
    # A posted receive occupies its thread blocks until the message arrives: few blocks leave the rest of the GPU to the
    # layers. The priority is high, because other ranks wait. PyTorch's flight recorder shows the name and the ranks.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = membership.timeout
    options.config.max_ctas = 4
    options.group_name = membership.name
    options.global_ranks_in_group = list(membership.members)
    return options
