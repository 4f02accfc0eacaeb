"""Datasets over megatron-core's GPTDataset have the samples that a run asks for, in the order of its seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from token_data import VOCAB_SIZE, build, config, counting, equal, microbatches, write_tokens

from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import requested_samples

pytestmark = pytest.mark.usefixtures("one_rank")


def test_labels_are_the_tokens_that_follow(prefix: str) -> None:
    for batch in microbatches(config(data_path=[prefix]), 5):
        tokens, labels = batch["tokens"], batch["labels"]
        assert tokens.shape == labels.shape == (2, 16)
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        inside = (tokens != VOCAB_SIZE) & (labels != VOCAB_SIZE)
        assert torch.equal(labels[inside], tokens[inside] + 1)
        assert torch.equal(batch["position_ids"], torch.arange(16).expand(2, 16))
        assert torch.equal(batch["loss_mask"], torch.ones(2, 16))


def test_sample_counts_are_megatrons() -> None:
    settings = config(train_iters=100, eval_interval=30, eval_iters=5)
    assert requested_samples(settings) == (800, (100 // 30 + 1) * 5 * 8, 5 * 8)


def test_data_is_repeated_for_as_long_as_the_run_is(prefix: str) -> None:
    settings = config(data_path=[prefix], train_iters=100)  # 800 samples from 1040 tokens
    datasets = build(settings)
    assert datasets.num_samples[0] >= 800
    assert datasets.num_samples[1:] == (0, 0)


def test_splits_do_not_share_documents(prefix: str) -> None:
    settings = config(data_path=[prefix], split="50,50", eval_iters=2, train_iters=5)
    datasets = build(settings)
    train, valid = (
        torch.cat([dataset[index]["tokens"] for index in range(30)]) for dataset in (datasets.train, datasets.valid)
    )
    # Document d counts d .. d+24: only the second half has numbers above 19 + 24.
    assert train[train != VOCAB_SIZE].max() == 19 + 24
    assert valid[valid != VOCAB_SIZE].min() == 20


def test_each_split_may_have_its_own_files(tmp_path: Path) -> None:
    train = write_tokens(tmp_path / "train", counting(0))
    valid = write_tokens(tmp_path / "valid", counting(500))
    datasets = build(config(train_data_path=[train], valid_data_path=[valid], split=Arguments.split, eval_iters=1))
    assert all(datasets.train[index]["tokens"][0] != 500 for index in range(10))
    assert all(datasets.valid[index]["tokens"][0] >= 500 for index in range(8))
    assert datasets.test is None


def test_weights_say_how_often_each_file_is_used(tmp_path: Path) -> None:
    low = write_tokens(tmp_path / "low", counting(0))
    high = write_tokens(tmp_path / "high", counting(500))
    dataset = build(config(data_path=["3", low, "1", high])).train
    from_high = sum(bool(((sample := dataset[i]["tokens"])[sample != VOCAB_SIZE] >= 500).all()) for i in range(40))
    assert from_high == 10


def test_a_blend_without_weights_that_is_too_short_is_refused(tmp_path: Path) -> None:
    paths = [write_tokens(tmp_path / name, counting(0)) for name in ("a", "b")]
    build(config(data_path=paths, train_iters=10))
    with pytest.raises(
        ValueError, match=r"--data-path: the train data has 128 samples of 16 tokens, the run needs 800"
    ):
        build(config(data_path=paths, train_iters=100))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_gets_the_rest_bit_for_bit(prefix: str, num_workers: int) -> None:
    settings = config(data_path=[prefix], num_workers=num_workers)
    for rank in range(2):
        uninterrupted = microbatches(settings, 12, rank=rank, ranks=2)
        resumed = microbatches(settings, 7, consumed=5 * 4, rank=rank, ranks=2)
        assert equal(resumed, uninterrupted[5:])
        assert not equal(resumed, uninterrupted[:7])


def test_the_seed_orders_the_data(prefix: str) -> None:
    first = microbatches(config(data_path=[prefix], seed=1), 5)
    assert equal(first, microbatches(config(data_path=[prefix], seed=1), 5))
    assert not equal(first, microbatches(config(data_path=[prefix], seed=2), 5))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_data_leaves_the_global_random_state_alone(prefix: str, num_workers: int) -> None:
    """Dropout draws from that state, which must stay the same on ranks that read data and on those that do not."""
    before = torch.get_rng_state()
    microbatches(config(data_path=[prefix], num_workers=num_workers), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_index_cache_goes_where_it_is_told_and_is_used_again(prefix: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    settings = config(data_path=[prefix], data_cache_path=str(cache))
    first = microbatches(settings, 3)
    files = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert sorted(os.listdir(tmp_path)) == ["cache", "corpus.bin", "corpus.idx"]
    assert equal(microbatches(settings, 3), first)
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == files


def test_data_made_anew_under_the_same_name_does_not_meet_the_old_index(prefix: str) -> None:
    settings = config(data_path=[prefix])
    microbatches(settings, 1)
    write_tokens(Path(prefix), counting(0, documents=3, length=7))
    for batch in microbatches(settings, 20):
        assert batch["tokens"][batch["tokens"] != VOCAB_SIZE].max() <= 2 + 6


def test_a_cache_that_cannot_be_written_is_one_line_that_names_the_flag(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--data-cache-path: .*Not a directory") as caught:
        build(config(data_path=[prefix], data_cache_path=str(tmp_path / "file" / "cache")))
    assert "\n" not in str(caught.value)


def test_a_damaged_cache_is_one_line_that_names_its_folder(prefix: str, tmp_path: Path) -> None:
    settings = config(data_path=[prefix], data_cache_path=str(tmp_path / "cache"))
    build(settings)
    (shuffle_index,) = (tmp_path / "cache").glob("*shuffle_index.npy")
    os.truncate(shuffle_index, shuffle_index.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"--data-cache-path: .*{tmp_path}/cache"):
        build(settings)


def test_mock_data_needs_no_files() -> None:
    datasets = build(config(mock_data=True, eval_iters=1))
    assert datasets.num_samples[0] >= 80
    assert datasets.train[0]["tokens"].shape == (16,)
