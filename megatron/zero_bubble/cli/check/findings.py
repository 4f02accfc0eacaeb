"""Formats the findings of `zero-bubble check`, and describes the machine: device, driver, versions and settings."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron.zero_bubble.cli.check.models import Model
from megatron.zero_bubble.cli.check.rank_check import RankFindings
from megatron.zero_bubble.cli.check.rank_jobs import ROOT
from megatron.zero_bubble.cli.check.stage_run import NUM_RANKS, MemoryCheck, StageProfile
from megatron.zero_bubble.cli.output import percent, table, table_of
from megatron.zero_bubble.planner import generate, placement_for
from megatron.zero_bubble.schedule import OpKind, simulate
from megatron.zero_bubble.trainer.model_count import UnitCount, count_model

PRICE_LIMIT = 1.03
"""Maximum of (time of B + time of W) / (time of the fused backward); above this maximum, the check fails."""
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v")


@dataclass(frozen=True)
class StageCheck:
    """The measurements of one stage of one model."""

    model: Model
    profile: StageProfile
    memory: Sequence[MemoryCheck]
    message_ms: float

    @property
    def passed(self) -> bool:
        return self.profile.price <= PRICE_LIMIT and all(check.passed for check in self.memory)

    @cached_property
    def bubble_rates(self) -> dict[str, float]:
        """Every schedule's predicted bubble rate at the model's pipeline size and number of microbatches."""
        rates = {}
        p = self.model.pipeline_size
        for name in SCHEDULES:
            costs = self.profile.costs(p, self.message_ms).split_ranks(placement_for(name, p))
            schedule = generate(name, p, self.model.num_microbatches, costs=costs)
            rates[name] = float(simulate(schedule, costs).bubble_rate)
        return rates

    @cached_property
    def _layer(self) -> UnitCount:
        """Activation memory and floating-point operations of one layer, as `zero-bubble estimate` counts them."""
        return count_model(self.model.arguments(NUM_RANKS)).layers[0]

    @property
    def tflops(self) -> float:
        """TFLOP/s of the stage while it computes F, B and W."""
        flops = self.model.layers_a_stage * self._layer.flops.total
        return flops / sum(self.profile.time(kind) for kind in (OpKind.F, OpKind.B, OpKind.W)) / 1e9

    @property
    def expected_memory(self) -> tuple[float, float]:
        """Estimated bytes that a stage holds for one microbatch after F (M_B) and after B (M_W)."""
        after_f, after_b = (self.model.layers_a_stage * held for held in self._layer.activations)
        return after_f, after_b

    def as_json(self) -> dict[str, Any]:
        times = {str(kind): self.profile.time(kind) for kind in self.profile.times}
        return {
            "model": asdict(self.model),
            "times_ms": times,
            "b_and_w_over_fused": self.profile.price,
            "tflops": self.tflops,
            "memory_bytes": {str(kind): value for kind, value in self.profile.memory.items()},
            "expected_memory_bytes": list(self.expected_memory),
            "temporary_memory_bytes": self.profile.temporary,
            "predicted_bubble_rates": self.bubble_rates,
            "peak_memory": [asdict(check) for check in self.memory],
        }


@dataclass(frozen=True)
class Findings:
    """All findings of `zero-bubble check` on one device."""

    machine: Mapping[str, Any]
    stages: Sequence[StageCheck] = ()
    without_room: Mapping[str, str] = field(default_factory=dict)
    """Name of a model whose stage did not fit on the device -> message of the GPU allocator."""
    ranks: RankFindings | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    """Name of a part of the check that failed -> error message of this part."""

    @property
    def passed(self) -> bool:
        measured = all(check.passed for check in self.stages)
        return measured and not self.without_room and not self.errors and (self.ranks is None or self.ranks.passed)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "passed": self.passed,
            "stages": [{**stage.as_json(), "passed": stage.passed} for stage in self.stages],
            "without_room": dict(self.without_room),
            "ranks": self.ranks.as_json() if self.ranks is not None else None,
            "errors": dict(self.errors),
        }

    def as_text(self, *, markdown: bool) -> str:
        parts = [f"device: {self.machine['device']}, torch {self.machine['torch']}\n"]
        if self.stages:
            parts.append(table_of(_TIMES, self.stages, markdown=markdown))
            parts.append(self._bubbles(markdown=markdown))
            checks = [(stage, check) for stage in self.stages for check in stage.memory]
            parts += [table_of(_MEMORY, checks, markdown=markdown)] if checks else []
        if self.ranks is not None:
            parts.append(self.ranks.as_text(markdown=markdown))
        parts += [
            f"{name}: a stage does not fit on this device, choose another model with --model: {reason}\n"
            for name, reason in self.without_room.items()
        ]
        parts += [f"{part}: ended with an error: {reason}\n" for part, reason in self.errors.items()]
        return "\n".join(parts)

    def _bubbles(self, *, markdown: bool) -> str:
        heads = ("predicted bubble rate", "ranks", "microbatches", *SCHEDULES)
        sizes = [(stage.model.name, stage.model.pipeline_size, stage.model.num_microbatches) for stage in self.stages]
        rates = [map(percent, stage.bubble_rates.values()) for stage in self.stages]
        rows = [(*map(str, size), *each) for size, each in zip(sizes, rates, strict=True)]
        return table(heads, rows, markdown=markdown)


def _ms(kind: OpKind) -> Callable[[StageCheck], str]:
    return lambda stage: f"{stage.profile.time(kind):.3f}"


def _price(stage: StageCheck) -> str:
    over = "" if stage.profile.price <= PRICE_LIMIT else f", over {PRICE_LIMIT}"
    return f"{stage.profile.price:.3f}{over}"


_TIMES: Mapping[str, Callable[[StageCheck], str]] = {
    "a stage of": lambda stage: stage.model.name,
    "layers": lambda stage: str(stage.model.layers_a_stage),
    "F (ms)": _ms(OpKind.F),
    "B (ms)": _ms(OpKind.B),
    "W (ms)": _ms(OpKind.W),
    "fused (ms)": _ms(OpKind.BW),
    "(B + W) / fused": _price,
    "TFLOP/s": lambda stage: f"{stage.tflops:.4g}",
}


def _as_mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.4g}"


_MEMORY: Mapping[str, Callable[[tuple[StageCheck, MemoryCheck]], str]] = {
    "memory (MiB)": lambda pair: pair[0].model.name,
    "a microbatch": lambda pair: _as_mib(pair[0].profile.memory[OpKind.F]),
    "counted": lambda pair: _as_mib(pair[0].expected_memory[0]),
    "temporary": lambda pair: _as_mib(pair[0].profile.temporary),
    "schedule": lambda pair: pair[1].schedule,
    "peak": lambda pair: _as_mib(pair[1].measured),
    "simulated": lambda pair: _as_mib(pair[1].simulated),
    "off by": lambda pair: f"{100 * (pair[1].measured / pair[1].simulated - 1):+.1f}%",
}


_PACKAGES = ("megatron-core", "numpy", "transformer-engine", "apex", "flash-attn", "triton")
_SETTINGS = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_", "GLOO_", "LD_PRELOAD")
"""Prefixes of environment variables that can change the results of the check on a device."""


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine for the findings."""
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
        "commit": _commit(),
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


def _commit() -> str | None:
    """Return the commit of the repository of this package; None without git or a repository."""
    try:
        git = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()
