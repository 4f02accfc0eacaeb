"""What trainings left behind, to compare: losses, and the tensors of checkpoints."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata


def losses(folder: Path, name: str) -> dict[int, str]:
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines}


def printed_losses(printed: str) -> list[str]:
    """The losses of the log lines that a training has printed."""
    return re.findall(r"lm loss: (\S+)", printed)


def tensors(folder: Path, name: str, iteration: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint that is a tensor: parameters, master weights, the optimizer's moments.

    megatron-core 0.16's `load_plain_tensors` fails with torch 2.15.
    """
    reader = FileSystemReader(folder / name / f"iter_{iteration:07d}")
    described = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [key for key, value in ours.items() if not torch.equal(value, theirs[key])]
