"""Opens connections between pipeline ranks, and measures how much device memory the connections take.

Torch does not count the device memory of the connections.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.communicator import TorchCommunicator, channels
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.variable_shapes import HEADER, VariableCommunicator, refuse_one_queue
from megatron.zero_bubble.schedule import Placement


class ChannelMemory(NamedTuple):
    """The number of connections (channels) of one rank, and the device memory of these connections."""

    num_channels: int
    num_bytes: int


def open_channels(
    communicator: type[TorchCommunicator],
    group: dist.ProcessGroup,
    placement: Placement,
    device: torch.device,
    timeout: timedelta,
    report: Callable[[ChannelMemory], None],
    *,
    shapes_vary: bool = False,
) -> TorchCommunicator | VariableCommunicator:
    """Open the connections between the ranks of a pipeline; all ranks of the pipeline's `group` make this call.

    Args:
        report: called on every rank of a job on GPUs, with the `ChannelMemory` of the rank that has the most
            connections.
        shapes_vary: whether the shapes of activations vary and are sent in headers.

    Raises:
        ValueError: activations vary in shape on a GPU with one hardware queue, and `communicator` is not
            `HostCommunicator`.
    """
    if shapes_vary and communicator is TorchCommunicator:
        refuse_one_queue(device)
    ranks = dist.get_process_group_ranks(group)
    free = _free_bytes(device)
    opened = communicator(ranks, group.rank(), placement, device, timeout)
    if free is not None:
        channel_bytes = free - (_free_bytes(device) or 0)
        num_channels = sum(group.rank() in ends for ends in channels(placement))
        report(max(from_all_ranks(ChannelMemory(num_channels, channel_bytes), group)))
    if not shapes_vary:
        return opened
    return VariableCommunicator(opened, TorchCommunicator(ranks, group.rank(), placement, HEADER.device, timeout))


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU in bytes, as counted by the GPU's driver; None for a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
