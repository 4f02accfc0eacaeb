"""Checksums of a checkpoint's files, and the order in which a checkpoint gets its name."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError
from megatron.zero_bubble.trainer.checkpoint_files import (
    CHECKSUMS,
    TRACKER,
    Checksum,
    begin_folder,
    check_checksums,
    check_config,
    checkpoint_folder,
    checksum,
    latest_iteration,
    name_latest,
    read_checksums,
    share,
    write_checksums,
)


def refusal(action, *arguments) -> str:
    with pytest.raises(CheckpointError, match=r"^[^\n]+$") as error:
        action(*arguments)
    return str(error.value)


def complete_folder(root: Path, iteration: int, text: str = "{}") -> Path:
    """Make the folder of a checkpoint as the ranks leave it before it gets its name."""
    folder = begin_folder(root, iteration)
    (folder / "metadata.json").write_text(text)
    return folder


@pytest.mark.parametrize("size", [0, 1, 2**20, 3 * 2**20 + 7])
def test_a_checksum_is_size_and_crc_of_the_whole_file(tmp_path, size):
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert checksum(tmp_path / "file") == Checksum(size, f"{zlib.crc32(data):08x}")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Checksum]]:
    """Two files, and what was saved of them."""
    for name in ("__0_0.distcp", "common.pt"):
        (tmp_path / name).write_bytes(os.urandom(5000))
    checksums = {path.name: checksum(path) for path in tmp_path.iterdir()}
    write_checksums(tmp_path, checksums)
    return tmp_path, checksums


def test_checksums_are_read_back(saved):
    folder, checksums = saved
    assert read_checksums(folder) == checksums
    check_checksums(folder, checksums)


def test_a_checkpoint_of_before_has_none(tmp_path):
    assert read_checksums(tmp_path) is None


def test_one_changed_bit_is_found(saved):
    folder, checksums = saved
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[4321] ^= 4
    (folder / "__0_0.distcp").write_bytes(data)
    assert refusal(check_checksums, folder, checksums) == (
        f"__0_0.distcp is damaged: its CRC-32 is {zlib.crc32(data):08x}, "
        f"that of what was saved {checksums['__0_0.distcp'].crc32}"
    )


def test_a_file_of_another_length_is_found_without_reading_it(saved, monkeypatch):
    folder, checksums = saved
    monkeypatch.delattr(zlib, "crc32")
    os.truncate(folder / "common.pt", 300)
    assert refusal(check_checksums, folder, {"common.pt": checksums["common.pt"]}) == (
        "common.pt has 300 bytes, expected 5000"
    )
    (folder / "common.pt").unlink()
    assert refusal(check_checksums, folder, {"common.pt": checksums["common.pt"]}) == (
        "common.pt is missing, expected 5000 bytes"
    )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"common.pt": 3}', '{"common.pt": {"bytes": "many", "crc32": ""}}', "{" * 9]
)
def test_damaged_checksums_are_refused(tmp_path, text):
    (tmp_path / CHECKSUMS).write_text(text)
    assert refusal(read_checksums, tmp_path).startswith(f"{CHECKSUMS} cannot be read: ")


def test_checksums_name_files_of_their_own_folder(tmp_path):
    (tmp_path / CHECKSUMS).write_text('{"../../etc/passwd": {"bytes": 1, "crc32": "00000000"}}')
    assert read_checksums(tmp_path) == {"passwd": Checksum(1, "00000000")}


SHARDS = [f"__{rank}_{index}.distcp" for rank in range(12) for index in range(2)]


@pytest.mark.parametrize("num_ranks", [1, 5, 12, 40])
def test_each_file_is_checked_by_one_rank(num_ranks):
    names = [*reversed(SHARDS), ".metadata", "common.pt"]
    shares = [share(names, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(name for names in shares for name in names) == sorted(names)
    sizes = [sum(name in SHARDS for name in names) for names in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_rank_checks_what_it_wrote():
    for rank in range(12):
        assert share(SHARDS, rank, 12) == [f"__{rank}_0.distcp", f"__{rank}_1.distcp"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"sharded_backend": "torch_dist", "sharded', "metadata.json cannot be read: Unterminated string"),
        ('{"sharded_backend": "torch_dist"}', "metadata.json cannot be read: 'sharded_backend_version'"),
        ("[1]", "metadata.json cannot be read: list indices must be integers"),
        (
            '{"sharded_backend": "zarr", "sharded_backend_version": 1}',
            "metadata.json says format zarr, version 1, expected torch_dist, version 1",
        ),
    ],
)
def test_the_format_of_a_checkpoint(tmp_path, text, problem):
    (tmp_path / "metadata.json").write_text(text)
    assert refusal(check_config, tmp_path).startswith(problem)


def test_a_checkpoint_has_its_name_when_it_is_complete(tmp_path):
    folder = complete_folder(tmp_path, 100)
    assert not checkpoint_folder(tmp_path, 100).exists()
    name_latest(tmp_path, 100)
    assert not folder.exists()
    assert latest_iteration(tmp_path) == 100


def test_everything_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """Files are synced first, because a power failure could otherwise leave a named checkpoint of empty files."""
    complete_folder(tmp_path, 100)
    calls: list[str] = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(file: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        real_fsync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda *paths: (calls.append("rename"), real_rename(*paths)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), real_replace(*paths)))
    name_latest(tmp_path, 100)
    assert calls[:4] == ["metadata.json", "iter_0000100.incomplete", "rename", tmp_path.name]
    assert calls[4].startswith(".latest")
    assert calls[5:] == ["replace"]


@pytest.mark.parametrize("breaks", ["rename", "replace"])
def test_a_crash_while_it_is_named_leaves_the_one_before(tmp_path, monkeypatch, breaks):
    complete_folder(tmp_path, 100)
    name_latest(tmp_path, 100)
    complete_folder(tmp_path, 200)

    def crash(*unused: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, breaks, crash)
    with pytest.raises(KeyboardInterrupt):
        name_latest(tmp_path, 200)
    assert latest_iteration(tmp_path) == 100


def test_what_earlier_attempts_left_makes_room(tmp_path):
    complete_folder(tmp_path, 100)
    name_latest(tmp_path, 100)
    complete_folder(tmp_path, 200)  # and then the job was killed
    folder = begin_folder(tmp_path, 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000100",
        "iter_0000300.incomplete",
        TRACKER,
    ]
    assert list(folder.iterdir()) == []


def test_the_latest_stays_whole_until_another_of_its_iteration_is(tmp_path):
    """A run that begins again in the same folder."""
    complete_folder(tmp_path, 100, "old")
    name_latest(tmp_path, 100)
    complete_folder(tmp_path, 100, "new")
    final = checkpoint_folder(tmp_path, 100) / "metadata.json"
    assert final.read_text() == "old"
    name_latest(tmp_path, 100)
    assert final.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000100", TRACKER]
