"""A checkpoint that Megatron-LM cannot load into the job's model chunks is refused; `torch_dist` fits every layout."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron.zero_bubble.launcher import script_checkpoint
from megatron.zero_bubble.launcher.script_checkpoint import check_chunks_of_checkpoint, given_checkpoint, other_format
from megatron.zero_bubble.session.start_up import SessionError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one file a rank."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    (tmp_path / "iter_0000004" / "mp_rank_00_000").mkdir(parents=True)
    return tmp_path


def with_shards(folder: Path) -> Path:
    (folder / "iter_0000004" / "metadata.json").touch()
    return folder


def test_a_pretrained_checkpoint_is_loaded_if_load_has_none(folder: Path, tmp_path: Path) -> None:
    script = Namespace(load=str(tmp_path / "new"), pretrained_checkpoint=str(folder))
    assert given_checkpoint(script) == "pretrained_checkpoint"
    assert given_checkpoint(Namespace(load=str(folder), pretrained_checkpoint=str(folder))) == "load"
    assert given_checkpoint(Namespace(load=None)) is None


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_the_files_tell_the_format(folder: Path, kind: str) -> None:
    script = Namespace(load=str(folder), ckpt_format=kind, ckpt_step=None)
    assert other_format(script, "load") == "torch"
    with_shards(folder)
    assert other_format(script, "load") is None
    (folder / "iter_0000002").mkdir()
    assert other_format(Namespace(**{**vars(script), "ckpt_step": 2}), "load") == "torch"


def saved_with(monkeypatch: pytest.MonkeyPatch, num_chunks: int | None) -> None:
    saved = Namespace(virtual_pipeline_model_parallel_size=num_chunks)
    monkeypatch.setattr(script_checkpoint, "saved_arguments", lambda script, name: saved)


@pytest.mark.parametrize(("was", "now"), [(None, 2), (2, 1), (2, 4)])
def test_another_number_of_chunks_is_refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, was: int | None, now: int
) -> None:
    """Megatron-LM would leave the further chunks with their initial weights."""
    saved_with(monkeypatch, was)
    script = Namespace(load=str(folder), ckpt_format="torch")
    check_chunks_of_checkpoint(script, was or 1)
    with pytest.raises(SessionError, match=r"^[^\n]+$") as error:
        check_chunks_of_checkpoint(script, now)
    assert str(error.value).startswith(
        f"--load {folder}: the checkpoint of format torch has {was or 1} chunks a rank, and this job has {now}: choose "
    )


def test_sharded_checkpoints_and_jobs_without_a_checkpoint_are_not_read(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(script_checkpoint, "saved_arguments", None)
    check_chunks_of_checkpoint(Namespace(load=None), 2)
    check_chunks_of_checkpoint(Namespace(load=str(with_shards(folder)), ckpt_format="torch_dist"), 2)
