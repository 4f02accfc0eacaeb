"""Damages checkpoints and tries to load them, then saves to a disk that fails; all in the ranks of one job.

Started by test_checkpoint_faults.py with a folder and the flags of a training. Rank 0 prints each outcome as a line of
JSON: its name, and what each rank says of it; None where all is well.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from tests.evil_pickle import Evil

TENSOR = "decoder.final_layernorm.weight"
OBJECT = "rng_state/shard_1"
EXTRA_STATE = "decoder.layers.mlp.linear_fc1._extra_state/shard_0"


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def overwrite(name: str) -> Callable[[Path], None]:
    """As many bytes as before, and none of them the same."""
    return lambda folder: (folder / name).write_bytes(bytes([0xEE]) * (folder / name).stat().st_size)


def evil_description(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil(marker_of(folder))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_common(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save({**common, "evil": Evil(marker_of(folder))}, folder / "common.pt")


def replaced(part: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Put what `make` gives in the place of a part of the state, behind the end of the file that holds it."""

    def replace_part(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        contents = io.BytesIO()
        torch.save(make(folder), contents)
        for index, place in metadata.storage_data.items():
            if index.fqn.startswith(part):
                with open(folder / place.relative_path, "ab") as file:
                    place.offset, place.length = file.tell(), file.write(contents.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return replace_part


def evil(folder: Path) -> list[Evil]:
    return [Evil(marker_of(folder))]


def evil_bytes(folder: Path) -> list[torch.Tensor]:
    """A pickle that runs code, in bytes as Transformer Engine keeps the state of FP8, which it unpickles itself."""
    return [torch.frombuffer(bytearray(pickle.dumps(Evil(marker_of(folder)))), dtype=torch.uint8)]


def evil_file(folder: Path) -> list[io.BytesIO]:
    """The same in a file in memory, as Transformer Engine kept the state of FP8 before its version 2."""
    file = io.BytesIO()
    torch.save(evil(folder), file)
    return [file]


def renamed(part: str) -> Callable[[Path], None]:
    """Damage that puts the part of another model into a checkpoint."""

    def rename(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.state_dict_metadata[part + "s"] = metadata.state_dict_metadata.pop(part)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return rename


def with_another(part: str) -> Callable[[Path], None]:
    """Damage that adds a part of another model to a checkpoint."""

    def add(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.state_dict_metadata[part + "s"] = metadata.state_dict_metadata[part]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return add


def without_entry(name: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        common = torch.load(folder / "common.pt", weights_only=False)
        del common[name]
        torch.save(common, folder / "common.pt")

    return drop


def marker_of(folder: Path) -> Path:
    return folder.parent / "marker"


FILES = ("__1_0.distcp", "common.pt", ".metadata", "metadata.json")
DAMAGES: dict[str, Callable[[Path], None]] = {
    "none": lambda folder: None,
    **{f"missing {name}": remove(name) for name in FILES},
    **{f"half of {name}": cut(name) for name in FILES},
    **{f"{name} overwritten": overwrite(name) for name in FILES},
    "another model's part": renamed(TENSOR),
    "a further part": with_another(TENSOR),
    "no flags": without_entry("args"),
    "no schedule": without_entry("opt_param_scheduler"),
    "evil .metadata": evil_description,
    "evil common.pt": evil_common,
    "evil object": replaced(OBJECT, evil),
    "evil tensor": replaced(TENSOR, evil),
    "evil extra state": replaced(EXTRA_STATE, evil_bytes),
    "evil older extra state": replaced(EXTRA_STATE, evil_file),
}


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Within, the writing of a longer file fails, in this process and in those that it starts."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failing(owner: Any, name: str) -> AbstractContextManager[Any]:
    """Within, this function finds the disk full."""

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return mock.patch.object(owner, name, fail)


def disk_faults() -> dict[str, Any]:
    """The faults that make saving fail, by name: rank 1 or both write too much, or rank 0 finds the disk full."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron.zero_bubble.trainer import checkpoint_files

    return {
        "long files": small_files(50_000),
        "long files on rank 1": small_files(50_000 if dist.get_rank() == 1 else 2**30),
        "common.pt": failing(TorchCommonSaveStrategy, "save_common"),
        ".metadata": failing(FileSystemWriterAsync, "finish"),
        "metadata.json": failing(serialization, "save_config"),
        "folder": failing(Path, "mkdir"),
        "fsync": failing(checkpoint_files, "_sync"),
    }


def tell(name: str, outcome: str | None) -> None:
    """Gather what each rank says, and print it."""
    outcomes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    if dist.get_rank() == 0:
        print(json.dumps([name, outcomes]), flush=True)


def attempt(action: Callable[[], None]) -> str | None:
    try:
        action()
    except ValueError as error:
        return str(error)
    return None


def main(root: Path, flags: list[str]) -> None:
    # With this, torch trusts every file that it is not told to distrust; Megatron-LM's users may have set it.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    substitute_cuda()
    from megatron.zero_bubble.session.session import Session
    from megatron.zero_bubble.trainer.arguments import parse_arguments
    from megatron.zero_bubble.trainer.checkpoint import Checkpointer, Progress, TrainingState
    from megatron.zero_bubble.trainer.checks import complete_and_check
    from megatron.zero_bubble.trainer.defaults import with_vocabulary
    from megatron.zero_bubble.trainer.initialize import initialized
    from megatron.zero_bubble.trainer.model import build_model, transformer_config
    from megatron.zero_bubble.trainer.optimization import build_lr_scheduler, build_optimizer
    from megatron.zero_bubble.trainer.tokenizer import load_tokenizer

    args, job = complete_and_check(parse_arguments(flags), os.environ, has_cuda=False)
    args = with_vocabulary(args, load_tokenizer(args).vocab_size)
    placement, progress = job.placement, Progress(iteration=1)
    with initialized(args, placement):
        config = transformer_config(args, placement.num_chunks, None)
        model = build_model(args, config, Session.to_build(job.flags, placement))
        optimizer = build_optimizer(args, model, config)
        scheduler = build_lr_scheduler(args, optimizer)
        good = root / "good"

        def checkpointer(load: Path | None = None) -> Checkpointer:
            folders = replace(args, save=str(good), load=None if load is None else str(load))
            return Checkpointer(folders, TrainingState(progress, model, optimizer, scheduler))

        optimizer.step()  # which makes its state
        tell("save", attempt(checkpointer().save))
        for name, damage in DAMAGES.items():
            if dist.get_rank() == 0:
                shutil.copytree(good, root / name)
                damage(root / name / "iter_0000001")
            dist.barrier()
            tell(name, attempt(checkpointer(load=root / name).load))
        progress.iteration = 2
        for name, fault in disk_faults().items():
            with fault:
                outcome = attempt(checkpointer().save)
            tell(f"disk: {name}", outcome)
            if dist.get_rank() == 0:
                print(json.dumps([f"left by {name}", sorted(os.listdir(good))]), flush=True)
        tell("save again", attempt(checkpointer().save))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
