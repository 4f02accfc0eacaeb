"""Files of a checkpoint are read without running what they hold."""

from __future__ import annotations

import argparse
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
from torch.distributed.checkpoint import filesystem, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError, extents, read_common, read_metadata
from tests.evil_pickle import Evil


def description(*, file: str = "__0_0.distcp") -> Metadata:
    """The metadata that torch and megatron-core write for a checkpoint of one tensor and one object."""
    place, size = MetadataIndex("weight", torch.Size([0, 0])), torch.Size([2, 3])
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), size, [ChunkStorageMetadata(torch.Size([0, 0]), size)]
    )
    metadata = Metadata(
        {"weight": tensor, "rng_state/shard_0_1": BytesStorageMetadata()},
        storage_data={
            place: filesystem._StorageInfo(file, 0, 700),
            MetadataIndex("rng_state/shard_0_1"): filesystem._StorageInfo(file, 700, 100),
        },
        storage_meta=StorageMeta("/path/to/checkpoint", "1"),
    )
    chunk = planner.TensorWriteData(tensor.chunks[0], tensor.properties, size)
    item = planner.WriteItem(place, planner.WriteItemType.SHARD, tensor_data=chunk)
    metadata.all_local_plans = [planner.SavePlan([item])]  # type: ignore[attr-defined]
    return metadata


def refusal(action, folder: Path) -> str:
    with pytest.raises(CheckpointError, match=r"^[^\n]+$") as error:
        action(folder)
    return str(error.value)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_description_is_read_as_it_was_written(tmp_path, protocol):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(description(), protocol))
    metadata = read_metadata(tmp_path)
    assert metadata == description()
    assert metadata.all_local_plans == description().all_local_plans  # type: ignore[attr-defined]
    assert extents(metadata) == {"__0_0.distcp": 800}


def test_a_description_of_megatron_core_15(tmp_path):
    old = MCoreMetadata()
    old.__dict__.update(description().__dict__)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(old))
    assert extents(read_metadata(tmp_path)) == {"__0_0.distcp": 800}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_description_cannot_run_code(tmp_path, protocol):
    marker = tmp_path / "marker"
    within = description()
    within.storage_meta = Evil(marker)  # type: ignore[assignment]
    for evil in (Evil(marker), within):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(evil, protocol))
        assert refusal(read_metadata, tmp_path) == (
            ".metadata cannot be read: it names posix.mkdir, which does not belong in a checkpoint and could run code"
        )
        assert not marker.exists()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (b"ctorch\nload\n", "torch.load"),
        (b"ctorch.serialization\nos.system\n", "torch.serialization.os.system"),
        (b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n", "torch.distributed.checkpoint.metadata.os.mkdir"),
        (b"cbuiltins\ngetattr\n", "builtins.getattr"),
    ],
)
def test_no_function_is_reached_through_a_module_that_is_known(tmp_path, call, name):
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + call + b"(V/tmp\ntR.")
    assert f"it names {name}," in refusal(read_metadata, tmp_path)


@pytest.mark.parametrize("file", ["../secret", "/dev/zero", "a/b", ""])
def test_a_description_names_files_of_its_own_folder(tmp_path, file):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(description(file=file)))
    assert refusal(read_metadata, tmp_path) == (
        f".metadata cannot be read: it names {file!r}, which is not a file in its folder"
    )


@pytest.mark.parametrize("data", [b"", b"\x80", pickle.dumps(3), pickle.dumps({"a": 1}), b"\x80\x04cut", bytes(100)])
def test_a_damaged_description(tmp_path, data):
    (tmp_path / ".metadata").write_bytes(data)
    assert refusal(read_metadata, tmp_path).startswith(".metadata cannot be read: ")


@pytest.mark.parametrize("read", [read_metadata, read_common])
def test_a_missing_file_is_named(tmp_path, read):
    assert refusal(read, tmp_path) in (".metadata is missing", "common.pt is missing")


COMMON = {
    "args": argparse.Namespace(num_layers=4, data_path=None, lr=1e-3),
    "optimizer": {"param_groups": [{"betas": (0.9, 0.95)}]},
    "random": {"numpy": np.random.RandomState(1).get_state(), "torch": torch.arange(5, dtype=torch.uint8)},
}


def save_common(folder: Path, state: object, **options: bool) -> None:
    torch.save(state, folder / "common.pt", **options)


def test_what_is_common_is_read_as_it_was_written(tmp_path):
    save_common(tmp_path, COMMON)
    common = read_common(tmp_path)
    assert common["args"] == COMMON["args"]
    assert common["optimizer"] == COMMON["optimizer"]
    assert str(common["random"]) == str(COMMON["random"])


@pytest.mark.parametrize("name", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_arrays_of_either_numpy_are_read(tmp_path, name):
    """NumPy 2 renamed the function that a pickled array names."""
    save_common(tmp_path, {"array": np.arange(3, dtype=np.uint32)}, _use_new_zipfile_serialization=False)
    data = (tmp_path / "common.pt").read_bytes()
    written = b"numpy._core.multiarray" if b"numpy._core.multiarray" in data else b"numpy.core.multiarray"
    (tmp_path / "common.pt").write_bytes(data.replace(written, name))
    assert read_common(tmp_path)["array"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_is_common_cannot_run_code(tmp_path, monkeypatch, is_zip):
    """It is refused even where the environment tells torch to trust files."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    save_common(tmp_path, {**COMMON, "evil": Evil(tmp_path / "marker")}, _use_new_zipfile_serialization=is_zip)
    assert refusal(read_common, tmp_path) == (
        "common.pt cannot be read: it names posix.mkdir, which does not belong in a checkpoint and could run code"
    )
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_what_is_common_cut_short(tmp_path, part):
    file = io.BytesIO()
    torch.save(COMMON, file)
    (tmp_path / "common.pt").write_bytes(file.getvalue()[: int(part * len(file.getvalue()))])
    assert refusal(read_common, tmp_path).startswith("common.pt cannot be read: ")


def save_common_object(folder: Path, state: object) -> None:
    """Save as megatron-core does from 0.19 on: behind something else in a file of rank 0."""
    file = io.BytesIO(b"something else")
    start = file.seek(0, io.SEEK_END)
    torch.save([state], file)
    metadata = description()
    place = filesystem._StorageInfo("__0_0.distcp", start, len(file.getvalue()) - start)
    metadata.storage_data[MetadataIndex("common_state/shard_0_1")] = place
    (folder / "__0_0.distcp").write_bytes(file.getvalue() + b"and more")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_is_common_is_read_from_among_the_shards(tmp_path, monkeypatch):
    save_common_object(tmp_path, COMMON)
    assert read_common(tmp_path)["args"] == COMMON["args"]
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    save_common_object(tmp_path, {**COMMON, "evil": Evil(tmp_path / "marker")})
    assert refusal(read_common, tmp_path) == (
        "__0_0.distcp cannot be read: it names posix.mkdir, which does not belong in a checkpoint and could run code"
    )
    assert not (tmp_path / "marker").exists()


def test_something_else_of_torch(tmp_path):
    save_common(tmp_path, torch.zeros(3))
    assert refusal(read_common, tmp_path) == "common.pt cannot be read: it holds a Tensor, not a dictionary"
