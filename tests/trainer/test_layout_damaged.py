"""A damaged checkpoint is one line, also where it is first read for its layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError
from megatron.zero_bubble.trainer import layout
from megatron.zero_bubble.trainer.layout import settle_layout
from tests.checked_flags import checked

OPEN: Any = SimpleNamespace(job=SimpleNamespace(is_layout_open=True))


def test_a_damaged_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "on_rank", lambda rank, action: action())
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"^[^\n]+$") as error:
        settle_layout(checked({"--load": str(tmp_path)}), OPEN)
    assert str(error.value).startswith(f"--load {tmp_path}: iter_0000007: metadata.json cannot be read: ")
