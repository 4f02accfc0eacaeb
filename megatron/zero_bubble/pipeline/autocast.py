"""Limits autocast to forwards: the operations of a backward use the data types that the forward has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """The settings of the `with torch.autocast(...)` block around a training or evaluation step."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype
    caches: bool

    @classmethod
    def current(cls, device_type: str) -> Autocast:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return cls(device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    def forward(self, *, keeps_casts: bool = True) -> torch.autocast:
        """Return an autocast context with the settings of this `Autocast`.

        Args:
            keeps_casts: whether autocast may cache the weights that it casts to another type. F of a checkpointed layer
                sets `keeps_casts` to False, because weights that are cast under `torch.no_grad` have no autograd graph.
        """
        return torch.autocast(self.device_type, self.dtype, self.is_enabled, cache_enabled=self.caches and keeps_casts)

    @contextmanager
    def only_in_forwards(self) -> Iterator[None]:
        """Switch autocast off in the `with` block, and clear autocast's cache of weights before and after the block."""
        torch.clear_autocast_cache()
        try:
            with torch.autocast(self.device_type, enabled=False):
                yield
        finally:
            torch.clear_autocast_cache()
