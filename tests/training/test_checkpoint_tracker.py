"""The file that names the latest checkpoint: what makes a half-written one invisible."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.zero_bubble.training.checkpoint import TRACKER, _replace_text, checkpoint_folder, latest_iteration


def save(root: Path, iteration: int) -> Path:
    """What a complete checkpoint looks like from outside."""
    folder = checkpoint_folder(root, iteration)
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    return folder


def test_names_are_megatrons(tmp_path):
    assert checkpoint_folder(tmp_path, 100) == tmp_path / "iter_0000100"
    assert TRACKER == "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize("text", ["100", "100\n", " 100 \n"])
def test_the_tracker_names_the_latest(tmp_path, text):
    save(tmp_path, 100)
    save(tmp_path, 200)  # written, but not named yet
    (tmp_path / TRACKER).write_text(text)
    assert latest_iteration(tmp_path) == latest_iteration(str(tmp_path)) == 100


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no checkpoint there (latest_checkpointed_iteration.txt is missing)"),
        ("", "latest_checkpointed_iteration.txt says '', which is not an iteration"),
        ("release", "latest_checkpointed_iteration.txt says 'release', which is not an iteration"),
        ("-5", "latest_checkpointed_iteration.txt says '-5', which is not an iteration"),
        ("1²", "latest_checkpointed_iteration.txt says '1²', which is not an iteration"),
        ("300", "iter_0000300, which latest_checkpointed_iteration.txt names, is missing or incomplete"),
        ("200", "iter_0000200, which latest_checkpointed_iteration.txt names, is missing or incomplete"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_that_names_the_flag(tmp_path, text, problem):
    save(tmp_path, 100)
    (save(tmp_path, 200) / "metadata.json").unlink()  # megatron-core writes it last
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        latest_iteration(tmp_path)
    assert str(error.value) == f"--load {tmp_path}: {problem}"


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint there"):
        latest_iteration(tmp_path / "nowhere")


def test_a_text_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / TRACKER
    _replace_text(path, "100")
    _replace_text(path, "200")
    assert path.read_text() == "200"
    assert [file.name for file in tmp_path.iterdir()] == [TRACKER], "nothing else is left"


@pytest.mark.parametrize("breaks", ["fsync", "replace"])
def test_a_crash_while_it_is_replaced_leaves_the_old_text(tmp_path, monkeypatch, breaks):
    path = tmp_path / TRACKER
    _replace_text(path, "100")

    def crash(*unused: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, breaks, crash)
    with pytest.raises(KeyboardInterrupt):
        _replace_text(path, "200")
    assert path.read_text() == "100"


def test_the_new_text_is_on_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    """Else a power failure could leave an empty file under the name."""
    calls = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), real_fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), real_replace(*names)))
    _replace_text(tmp_path / TRACKER, "100")
    assert calls == ["fsync", "replace"]
