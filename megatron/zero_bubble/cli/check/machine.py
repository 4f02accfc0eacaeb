"""Describes the machine that the check runs on: device, driver, versions and settings."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("megatron-core", "numpy", "transformer-engine", "apex", "flash-attn", "triton")
_SETTINGS = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_", "GLOO_", "LD_PRELOAD")
"""Prefixes of environment variables that change how a device works."""


def describe_machine(root: Path) -> dict[str, Any]:
    """Return the facts about this machine for a report of results; `root` is the folder of this repository."""
    from megatron.core import __version__

    has_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_cuda else "CPU",
        **(_describe_device() if has_cuda else {}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "megatron-core": __version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(root),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def _describe_device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "devices": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    """Return the commit of the repository in `root`; None without git or a repository."""
    try:
        git = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()
