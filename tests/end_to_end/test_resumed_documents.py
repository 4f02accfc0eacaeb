"""Replicas that train on documents of different lengths draw different numbers, and each resumes with its own."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.test_documents import write_documents
from tests.launch import TINY_GPT
from tests.trainings import run_trainings

DOCUMENTS = (
    *(*TINY_GPT, "--variable-seq-lengths", "--seq-length", "64", "--global-batch-size", "8"),
    *("--train-iters", "6", "--hidden-dropout", "0.2"),
)


def test_replicas_resume_with_their_own_random_states(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus")
    folder = str(tmp_path / "checkpoints")
    first = [*DOCUMENTS, "--save", folder, "--save-interval", "3"]
    second = [*DOCUMENTS, "--load", folder]
    printed = run_trainings(2, {"first": first}, tmp_path)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    printed |= run_trainings(2, {"second": second}, tmp_path)
    assert "random states" not in printed["second"]
    lines = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("first", "second")]
    assert lines[1] == lines[0][3:]
