"""Finds the device of this process, and the part of the device's memory that operations may use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from megatron.zero_bubble.runtime.joint import from_all_ranks


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU if torch finds no GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


MARGIN = 0.9
"""Share of the free memory that the memory limit `auto` gives to activations; the rest allows for fragmentation."""


def limits_of_ranks(in_bytes: Sequence[float], inside: Sequence[float]) -> tuple[float, ...]:
    """Return for each rank the memory limit minus the temporary memory of one operation, but at least 1 byte.

    Args:
        in_bytes: rank -> memory limit for activations and temporary memory, in bytes.
        inside: rank -> temporary memory (such as logits) that one operation needs, in bytes.
    """
    # At least 1 byte, so that planning fails with an error that names the smallest limit that works.
    return tuple(max(1.0, limit - needed) for limit, needed in zip(in_bytes, inside, strict=True))


def least_free_bytes(device: torch.device) -> float:
    """Return the memory in bytes that every GPU of the job can still allocate; a collective call of all ranks."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(from_all_ranks(float(free + unused)))


def states_of_ranks(device: torch.device, rank: int, num_ranks: int) -> tuple[float, ...] | None:
    """Return, for each pipeline rank, the memory of parameters, gradients and optimizer states, in bytes.

    `states_of_ranks` is a collective call of all ranks between two steps. On a CPU, the result is None.

    Args:
        rank: pipeline rank of this process.
    """
    if device.type != "cuda":
        return None
    allocated = from_all_ranks((rank, float(torch.cuda.memory_allocated(device))))
    return tuple(max(size for each, size in allocated if each == number) for number in range(num_ranks))


def return_free_heap() -> None:
    """Return the free memory of the C library's heap to the operating system.

    Until `malloc_trim` is called, glibc keeps free memory whose addresses are below the addresses of memory in use.
    Other C libraries have no `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
