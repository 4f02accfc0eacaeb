"""Creates process groups among any ranks of a job, without the others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MAX_BLOCKS = 4
"""Most thread blocks that a message occupies on a GPU. A receive occupies its blocks from its posting to its
arrival."""


@dataclass(frozen=True)
class Membership:
    """All that one member needs to create a process group together with the others."""

    name: str
    members: tuple[int, ...]
    """Global ranks of all members, the same on each."""
    rank: int
    """This member: an index into `members`."""
    device: torch.device
    timeout: timedelta


def connect(membership: Membership) -> Any:
    """Create a member's backend, a `ProcessGroupNCCL` or `ProcessGroupGloo`; the members meet in the job's store.

    `dist.new_group` cannot be used, because every rank of the job would have to call it for every group. With
    `use_local_synchronization` only the members call it, but then the name of the group counts the groups of the
    caller. Members with different numbers of groups would wait for each other for ever.
    """
    rank, size = membership.rank, len(membership.members)
    store = dist.PrefixStore(membership.name, dist.distributed_c10d._get_default_store())
    # All members count their groups of this name, so that a second group does not read the first one's keys.
    generation = store.add(f"generation of {rank}", 1)
    store = dist.PrefixStore(str(generation), store)
    if membership.device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, size, _nccl_options(membership))
    return dist.ProcessGroupGloo(store, rank, size, membership.timeout)


def _nccl_options(membership: Membership) -> Any:
    """Return NCCL options with priority over computing, because other ranks wait, and few thread blocks.

    The flight recorder shows the group by its name and ranks.
    """
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = membership.timeout
    options.config.max_ctas = MAX_BLOCKS
    options.group_name = membership.name
    options.global_ranks_in_group = list(membership.members)
    return options
