"""What trainings left behind, to compare: losses, and the tensors of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def losses(folder: Path, name: str) -> dict[int, str]:
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines}


def tensors(folder: Path, name: str, iteration: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint that is a tensor: parameters, master weights, the optimizer's moments."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load_plain_tensors(str(folder / name / f"iter_{iteration:07d}"))
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [key for key, value in ours.items() if not torch.equal(value, theirs[key])]
