"""The device that this process computes on."""

from __future__ import annotations

import torch


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU where torch finds none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
