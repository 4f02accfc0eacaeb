"""Reads checkpoints in torch_dist format without running code that the checkpoints contain.

Reading a pickle calls any function that the pickle names, and three kinds of files in a checkpoint contain pickles.
This module reads every pickle of a checkpoint with an unpickler that allows only expected classes:

- `.metadata`, which torch and megatron-core read with plain `pickle`, may contain the classes in `_METADATA_NAMES`;
- the objects in the `.distcp` files, which torch reads with plain `pickle`, are read with
  `torch.load(weights_only=True)`;
- `common.pt`, which megatron-core up to 0.18 writes, is read with `torch.load(weights_only=True)`, even if an
  environment variable switches `weights_only` off.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.runtime.joint import from_all_ranks, jointly

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
_COMMON_OBJECT = MetadataIndex("common_state/shard_0_1")
"""Index of the object in a `.distcp` file that replaces the file `common.pt` from megatron-core 0.19 on."""

_METADATA_NAMES = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("pathlib", "PosixPath"), ("pathlib", "PurePosixPath")),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    )),
    *(("torch.distributed.checkpoint.planner", name) for name in (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # These classes are written by torch up to 2.2 and by megatron-core up to 0.15.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}  # fmt: skip


class CheckpointError(ValueError):
    """Raised when a checkpoint cannot be read or written; the error's message is one line for the user."""


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message, without the advice and traces that some libraries add."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].split(". ")[0] if lines else type(error).__name__


def read_metadata(folder: Path) -> Metadata:
    """Read a checkpoint's `.metadata`, which lists the parts of the checkpoint and their positions in files.

    Raises:
        CheckpointError: `.metadata` is missing or damaged, or does not describe a checkpoint.
    """
    with _reading(METADATA_FILE), open(folder / METADATA_FILE, "rb") as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
        names = {place.relative_path for place in metadata.storage_data.values()}
        if not isinstance(metadata.state_dict_metadata, dict):
            raise TypeError("it does not describe a checkpoint")
        if outside := [name for name in names if not name or Path(name).name != name]:
            raise ValueError(f"it names {outside[0]!r}, which is not a file in its folder")
    return metadata


def extents(metadata: Metadata) -> dict[str, int]:
    """Return the minimum size in bytes of each file of a checkpoint, by file name."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


def read_common(folder: str | Path) -> dict[str, Any]:
    """Read the part of a checkpoint that all ranks share: flags, iteration, hyperparameters.

    Raises:
        CheckpointError: the file with the checkpoint's shared part is missing, is damaged, or names a function that
            could run code.
    """
    folder = Path(folder)
    place = None
    if not (folder / COMMON_FILE).exists():
        place = read_metadata(folder).storage_data.get(_COMMON_OBJECT)
    name, start, length = (COMMON_FILE, 0, -1) if place is None else (place.relative_path, place.offset, place.length)
    with _reading(name), open(folder / name, "rb") as file:
        file.seek(start)
        common = _load_restricted(io.BytesIO(file.read(length)))
        if place is not None:
            (common,) = common
        if not isinstance(common, dict):
            raise TypeError(f"it holds a {type(common).__name__}, not a dictionary")
    return common


def load(request: dict[str, Any], folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Load and return the state that this rank requests; a collective call of all ranks.

    Args:
        metadata: the metadata that `read_metadata` returned for `folder`.

    Raises:
        CheckpointError: raised on every rank, if a requested part is missing, is damaged or has an unexpected type, or
            if the checkpoint has a model tensor that no rank requests.
    """
    requested: set[str] = set()

    def load_part() -> dict[str, Any]:
        # The reader of the shared part is a method up to megatron-core 0.16, a function from 0.17 on, and another
        # function from 0.19 on.
        owner = getattr(common_strategies, "TorchCommonLoadStrategy", serialization)
        name = "load_common" if hasattr(owner, "load_common") else "load_common_state_dict"
        try:
            with (
                replaced(torch_dist, "_get_filesystem_reader", lambda folder, *_, **__: _Reader(metadata, folder)),
                replaced(torch_dist, "MCoreLoadPlanner", partial(_Planner, requested)),
                replaced(owner, name, lambda *args: read_common(args[-1])),
            ):
                return dist_checkpointing.load(request, str(folder))
        except CheckpointException as error:
            # Up to megatron-core 0.16, a CheckpointException has the errors of all ranks, and is raised on all ranks.
            reason, _ = error.failures[min(error.failures)]
            raise CheckpointError(first_sentence(reason)) from error

    state = jointly(load_part)
    _refuse_unused(metadata, requested)
    return state


def _refuse_unused(metadata: Metadata, requested: set[str]) -> None:
    """Raise `CheckpointError` on every rank, if the checkpoint has model tensors that no rank requests."""
    names = set().union(*from_all_ranks(requested))
    modules = {name.split(".")[0] for name in names} - {"optimizer"}
    unused = [
        name
        for name, part in metadata.state_dict_metadata.items()
        if isinstance(part, TensorStorageMetadata) and name.split(".")[0] in modules and name not in names
    ]
    if unused:
        raise CheckpointError(f"has {unused[0]}{_and_others(unused)}, which the model that the flags ask for lacks")


def _and_others(names: list[str]) -> str:
    return f" and {len(names) - 1} other parts" if len(names) > 1 else ""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes that a `.metadata` file may contain."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _METADATA_NAMES:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)


def _load_restricted(file: io.BytesIO) -> Any:
    """Load `file`, and allow only tensors, arrays, plain values and classes that megatron-core declares safe."""
    # A checkpoint holds NumPy's random state, whose constructor NumPy 1 and NumPy 2 save under different names.
    make_array: Any = np.empty(0).__reduce__()[0]
    names: list[Any] = [(make_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with torch.serialization.safe_globals(names):
        return torch.load(file, map_location="cpu", weights_only=True)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn any error inside the `with` block into a `CheckpointError` that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is missing") from error
    except Exception as error:
        raise CheckpointError(f"{name} cannot be read: {_why(error)}") from error


def _why(error: Exception) -> str:
    """Return the reason of an error in one line, without torch's advice to set `weights_only=False`."""
    if isinstance(error, pickle.UnpicklingError):
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            return f"it names {name[1]}, which does not belong in a checkpoint and could run code"
        if reason := re.search(r"WeightsUnpickler error:\s*(.+)", str(error)):
            return reason[1]
    return first_sentence(error)


class _Reader(FileSystemReader):
    """torch's reader of `.distcp` files, changed to take metadata that is already read and to name files in errors."""

    def __init__(self, metadata: Metadata, path: str) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *unused: Any, **also_unused: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name in items:
            with _reading(name):
                super().read_data(replace(plan, items=items[name]), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Planner(torch_dist.MCoreLoadPlanner):
    """megatron-core's load planner, changed to report missing parts in one line and to unpickle only safe classes."""

    def __init__(self, requested: set[str], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._requested = requested
        """Collects the names of the parts that this rank asks for."""

    def create_local_plan(self) -> LoadPlan:
        self._requested.update(self.state_dict)
        missing = [name for name in self.state_dict if name not in self.metadata.state_dict_metadata]
        if missing:
            more = _and_others(missing)
            raise CheckpointError(f"lacks {missing[0]}{more} of the model or optimizer that the flags ask for")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        objects, name = _load_restricted(value), read_item.dest_index.fqn
        # Transformer Engine unpickles a layer's extra state.
        for part in objects if "_extra_state" in name else ():
            if isinstance(part, torch.Tensor) and part.numel() > 0:
                raise ValueError(f"{name} is FP8 state, which Transformer Engine would unpickle without protection")
            if isinstance(part, io.BytesIO):
                _load_restricted(io.BytesIO(part.getvalue()))
        # torch's planner unpickles without restriction, and therefore gets only bytes that were pickled here.
        harmless = io.BytesIO()
        torch.save(objects, harmless)
        harmless.seek(0)
        super().load_bytes(read_item, harmless)
