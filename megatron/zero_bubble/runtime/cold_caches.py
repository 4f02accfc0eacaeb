"""Evicts a device's caches, so that each measured operation starts with cold caches, as it does during training."""

from __future__ import annotations

import torch

_LEAST_BYTES = 32 * 2**20
"""Least size, in bytes, of the buffer that evicts the caches; a CPU core's caches and TLB cover fewer bytes."""


class ColdCaches:
    """Evicts the contents of a device's caches by reading and writing a buffer.

    During training, other layers and other microbatches have filled the caches before an operation begins. An operation
    that is repeated alone finds its parameters, its code and its last results in the caches. On a CPU, repeated
    operations of layers with 128 to 192 hidden units take 15 to 20% less time than during training.
    """

    def __init__(self, device: torch.device) -> None:
        num_bytes = _LEAST_BYTES
        if device.type == "cuda":
            num_bytes = max(num_bytes, torch.cuda.get_device_properties(device).L2_cache_size)
        self._buffer = torch.zeros(num_bytes // 4, device=device)

    def evict(self) -> None:
        """Evict the contents of the caches; on a GPU, by a kernel on the current stream."""
        self._buffer.add_(1)
