"""The format of a checkpoint, and the order in which it gets its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError
from megatron.zero_bubble.trainer.checkpoint_files import (
    TRACKER,
    begin_folder,
    check_config,
    checkpoint_folder,
    latest_iteration,
    name_latest,
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
