"""A place that cannot be written is refused before the first iteration, not found out after a thousand."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.session.output_places import check_zero_bubble_outputs
from megatron.zero_bubble.trainer.checks import check_checkpoint_and_numerics
from tests.checked_flags import checked

PLANNED = {"--zero-bubble": None, "--global-batch-size": "16"}
FOLDERS = ["--save", "--zero-bubble-timeline"]
FILES = ["--log-numerics", "--zero-bubble-profile-output"]


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this user may look into, and a file in it; root, who may run the tests, may write everywhere."""
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "file").touch()

    def access(path: Path, mode: int) -> bool:
        assert mode & os.W_OK
        assert bool(mode & os.X_OK) == Path(path).is_dir()
        return not Path(path).is_relative_to(folder)

    monkeypatch.setattr(os, "access", access)
    return folder


def refusal(name: str, value: Path) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked({**PLANNED, name: str(value)})
    return str(error.value)


@pytest.mark.parametrize("name", ["--load", *FOLDERS, *FILES])
def test_an_empty_name_as_of_an_unset_variable(name: str) -> None:
    given = replace(checked(PLANNED), **{name.lstrip("-").replace("-", "_"): ""})
    check = check_zero_bubble_outputs if name.startswith("--zero-bubble") else check_checkpoint_and_numerics
    with pytest.raises(ValueError, match=f"^{name} '' names no place: give a path, or leave the flag out$"):
        check(given)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written_or_made(name: str, locked: Path) -> None:
    for folder in (locked, locked / "new", locked / "new" / "and" / "below"):
        line = f"{name} {folder}: this user may not write to {locked}: choose another place"
        assert refusal(name, folder) == line
    checked({**PLANNED, name: str(locked.parent / "new" / "and" / "below")})
    assert sorted(os.listdir(locked.parent)) == ["locked"], "the check makes nothing"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_system_that_takes_nothing_whatever_the_permissions(name: str) -> None:
    folder = "/proc/new"
    line = f"{name} {folder}: nothing can be made in /proc (No such file or directory): choose another place"
    assert refusal(name, Path(folder)) == line


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_written_or_made(name: str, locked: Path) -> None:
    for file, place in ((locked / "new", locked), (locked / "file", locked / "file")):
        assert refusal(name, file) == f"{name} {file}: this user may not write to {place}: choose another place"
    checked({**PLANNED, name: str(locked.parent / "new")})


@pytest.mark.parametrize("name", FILES)
def test_a_file_whose_folder_takes_no_new_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file beside an existing one, or beside a link's target, replaces it."""
    folder, link = tmp_path / "locked", tmp_path / "link"
    folder.mkdir()
    (folder / "file").touch()
    link.symlink_to(folder / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    for file in (folder / "file", link):
        assert refusal(name, file) == f"{name} {file}: this user may not write to {folder}: choose another place"
    checked({**PLANNED, name: "/dev/null"})


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_where_a_folder_should_be(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    checked({**PLANNED, name: str(file)})  # it will be made
    file.touch()
    for folder in (file, file / "below"):
        assert refusal(name, folder) == f"{name} {folder}: {file} is not a folder"


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_a_folder_and_a_folder_instead_of_a_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "file"
    assert refusal(name, file) == f"{name} {file}: its folder does not exist"
    assert refusal(name, tmp_path) == f"{name} {tmp_path} is a folder; name a file"


def test_saving_is_refused_where_megatron_core_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without psutil megatron-core's writer of checkpoints would hang."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "psutil" else find_spec(name))
    assert refusal("--save", tmp_path).endswith("only where the package psutil is installed")
    checked(PLANNED)
