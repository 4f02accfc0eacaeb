"""Evicts a device's caches, so that each measured operation starts with cold caches, as it does during training."""

from __future__ import annotations

import torch


class ColdCaches:
    """Evicts the contents of a device's caches by reading and writing a buffer.

    During training, other layers and other microbatches have filled the caches before an operation begins. If a
    measurement repeats one operation, the caches already contain the operation's parameters, code and last results. On
    a CPU, repeated operations of layers with 128 to 192 hidden units take 15 to 20% less time than during training.
    """

    def __init__(self, device: torch.device) -> None:
        num_bytes = 32 * 2**20  # more than the caches and the TLB of a CPU core cover
        if device.type == "cuda":
            num_bytes = max(num_bytes, torch.cuda.get_device_properties(device).L2_cache_size)
        self._buffer = torch.zeros(num_bytes // 4, device=device)

    def evict(self) -> None:
        """Evict the contents of the device's caches; on a GPU, this call launches a kernel on the current stream."""
        self._buffer.add_(1)
