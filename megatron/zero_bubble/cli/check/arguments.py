"""The flags of `zero-bubble check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.zero_bubble.cli.check.matrix import names
from megatron.zero_bubble.cli.check.models import REPEATABLE_ATTENTION, SIZES
from megatron.zero_bubble.cli.invocation import at_least, positive
from megatron.zero_bubble.cli.shared_flags import CommandFlags, check_output
from megatron.zero_bubble.session.flag_parser import flag

PARTS = ("stages", "ranks")


@dataclass(frozen=True)
class CheckFlags(CommandFlags):
    """the check"""

    device: str = flag("device to check; cpu tries the check itself without a GPU", "cuda", choices=("cuda", "cpu"))
    size: str = flag("models to measure; paper: those of the zero-bubble paper", "paper", choices=tuple(SIZES))
    only: list[str] | None = flag("run this part of the check only; repeat for more", action="append", choices=PARTS)
    transformer_impl: str = flag(
        "layers to measure and train: megatron-core's own, or Transformer Engine's",
        "local",
        choices=tuple(REPEATABLE_ATTENTION),
    )
    model: str | None = flag("measure a stage of this model only", metavar="NAME")
    cell: list[str] | None = flag(
        "run this job of the part ranks only; repeat for more (default: all)", action="append", choices=names()
    )
    rounds: int = flag("timed steps of a stage", 5, parse=at_least(1), metavar="N")
    time_limit: float = flag(
        "largest duration of a job in the part ranks, in seconds", 180, parse=positive, metavar="X"
    )
    interconnect_bandwidth: float = flag(
        "speed of messages in the predictions, in GB/s", 25, parse=positive, metavar="X"
    )
    markdown: bool = flag("write tables in Markdown", False)
    output: Path = flag("file for all findings, as JSON, to attach to a report", "gpu-check.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, part in (("--model", self.model, "stages"), ("--cell", self.cell, "ranks")):
            if value is not None and part not in (self.only or PARTS):
                given = value if isinstance(value, str) else value[0]
                raise ValueError(f"argument {name}: {given} needs --only {part}, or no --only")
        models = [model.name for model in SIZES[self.size]]
        if self.model is not None and self.model not in models:
            raise ValueError(f"argument --model: {self.model} is not one of {', '.join(models)}")
        if self.device == "cpu" and self.transformer_impl != "local":
            raise ValueError(f"argument --transformer-impl: {self.transformer_impl} needs --device cuda")
        if missing := [name for name in self.cell or () if name not in names(self.transformer_impl)]:
            raise ValueError(f"argument --cell: {missing[0]} needs --transformer-impl local")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no CUDA device here; --device cpu --size tiny tries the check on a CPU")
        if self.device == "cuda":
            # Imported here, because megatron-core may be imported without CUDA only after `substitute_cuda`.
            from megatron.zero_bubble.session.settings import check_implementation

            check_implementation(self.transformer_impl)
        if self.device == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "argument --device cpu: megatron-core would use this machine's GPU; hide it: CUDA_VISIBLE_DEVICES="
            )
        check_output(self.output)
