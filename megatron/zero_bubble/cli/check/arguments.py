"""The flags of `zero-bubble check`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.zero_bubble.cli.check.matrix import NAMES
from megatron.zero_bubble.cli.check.models import SIZES
from megatron.zero_bubble.cli.flag_values import at_least, positive
from megatron.zero_bubble.cli.shared_flags import CommandFlags
from megatron.zero_bubble.job.flag_parser import flag

PARTS = ("numerics", "stages", "ranks")


@dataclass(frozen=True)
class CheckFlags(CommandFlags):
    """the check"""

    device: str = flag("cpu: to try the check itself", "cuda", choices=("cuda", "cpu"))
    size: str = flag("size of the models; paper: those of the zero-bubble paper", "paper", choices=tuple(SIZES))
    only: list[str] | None = flag("a part of the check; repeat for more", None, repeat=True, choices=PARTS)
    model: str | None = flag("measure a stage of this model only", None, metavar="NAME")
    cell: list[str] | None = flag(
        "a training of the ranks' matrix; repeat for more (default: all)", None, repeat=True, choices=NAMES
    )
    rounds: int = flag("steps that are timed", 5, parse=at_least(1), metavar="N")
    time_limit: float = flag("seconds that a training of several ranks may take", 180, parse=positive, metavar="X")
    interconnect_bandwidth: float = flag("GB/s of the messages in the predictions", 25, parse=positive, metavar="X")
    megatron_core: Path | None = flag(
        "its wheel, or the folder that holds megatron/core, where it is not installed",
        None,
        parse=Path,
        metavar="PATH",
    )
    markdown: bool = flag("print tables as Markdown", False)
    output: Path = flag(
        "for everything that was found, as JSON: the file to send in", "gpu-check.json", parse=Path, metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [model.name for model in SIZES[self.size]]
        if self.model is not None and self.model not in names:
            raise ValueError(f"argument --model: {self.model} is not one of {', '.join(names)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no CUDA device here; --device cpu --size tiny tries the check on a CPU")
        if self.device == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "argument --device cpu: megatron-core takes the GPU that is here; hide it, CUDA_VISIBLE_DEVICES="
            )
        _refuse_output(self.output)


def _refuse_output(output: Path) -> None:
    """Raise `ValueError` if the file cannot be written, before a long check whose findings would be lost."""
    folder = output.parent
    if not folder.is_dir():
        raise ValueError(f"argument --output: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"argument --output: no permission to write to {folder}")
    if output.is_dir():
        raise ValueError(f"argument --output: {output} is a folder; name a file")
