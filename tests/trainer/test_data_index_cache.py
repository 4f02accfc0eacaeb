"""The cache of sample indices after a write that was cut short, and blends without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from token_data import write_tokens

from megatron.zero_bubble.trainer.data import Datasets, build_datasets
from megatron.zero_bubble.trainer.tokenizer import NullTokenizer
from tests.checked_flags import data_flags

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Two corpora of forty documents each."""
    documents = [[*range(first, first + 25)] for first in range(40)]
    return [write_tokens(tmp_path / name, documents) for name in ("one", "two")]


def build(**settings: object) -> Datasets:
    defaults = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 8, "train_iters": 2, "split": "1"}
    args = data_flags(**(defaults | settings))
    return build_datasets(args, NullTokenizer(1000), needs_data=True)


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros"])
def test_a_damaged_index_is_one_line_with_the_folder_to_remove(
    prefixes: list[str], tmp_path: Path, damage: str
) -> None:
    cache = tmp_path / "cache"
    build(data_path=prefixes[:1], data_cache_path=str(cache))
    for file in cache.glob("*.npy"):
        text = file.read_bytes()
        file.write_bytes({"empty": b"", "cut": text[:-8], "zeros": bytes(len(text))}[damage])
    with pytest.raises(ValueError, match=r"^--data-cache-path: no dataset index in [^\n]+$") as error:
        build(data_path=prefixes[:1], data_cache_path=str(cache))
    assert str(error.value).endswith(f"; if files there are damaged, remove {cache}: it is built again")


def test_a_blend_without_weights_needs_no_test_data(prefixes: list[str]) -> None:
    """Nothing reads the test split, whose two documents of each corpus are too short for an evaluation."""
    split = {"data_path": prefixes, "split": "80,15,5", "eval_interval": 10}
    assert 0 < build(**split, eval_iters=1).num_samples[2] < 8
    with pytest.raises(ValueError, match=r"^--data-path: the valid data has \d+ samples .* the run needs 40;"):
        build(**split, eval_iters=5)
