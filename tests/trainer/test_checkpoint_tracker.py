"""The file that names the latest checkpoint: what makes a half-written one invisible."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.trainer.checkpoint_files import TRACKER, checkpoint_folder, latest_iteration
from megatron.zero_bubble.trainer.pretrain import without_first_load
from tests.checked_flags import checked


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
        ("300", "iter_0000300, which latest_checkpointed_iteration.txt names, is missing"),
        (
            "200",
            "iter_0000200, which latest_checkpointed_iteration.txt names, is incomplete: metadata.json is missing",
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_line_that_names_the_flag(tmp_path, text, problem):
    save(tmp_path, 100)
    (save(tmp_path, 200) / "metadata.json").unlink()  # megatron-core writes it last
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        latest_iteration(tmp_path)
    remedy = "write the iteration to load into latest_checkpointed_iteration.txt: 100"
    assert str(error.value) == f"--load {tmp_path}: {problem}; {remedy}"


def test_the_folder_of_one_iteration_is_not_the_folder_of_a_job(tmp_path):
    folder = save(tmp_path, 100)
    (tmp_path / TRACKER).write_text("100")
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        latest_iteration(folder)
    assert str(error.value) == (
        f"--load {folder}: no checkpoint there ({TRACKER} is missing); give {tmp_path}, whose {TRACKER} names the "
        "iteration to load"
    )


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint there"):
        latest_iteration(tmp_path / "nowhere")


def test_a_tracker_that_cannot_be_read(tmp_path):
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        latest_iteration(tmp_path)
    assert str(error.value) == f"--load {tmp_path}: {TRACKER} cannot be read: Is a directory"
    args = checked({"--load": str(tmp_path), "--save": str(tmp_path)})
    assert without_first_load(args) == args, "it is not the first load"
