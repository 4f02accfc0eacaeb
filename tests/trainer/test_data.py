"""Datasets, loaders and batches over megatron-core's GPTDataset, on CPU with gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import Datasets, build_datasets, get_batch, needed_tensors
from megatron.zero_bubble.trainer.data_config import check_data, requested_samples
from megatron.zero_bubble.trainer.data_loader import MicrobatchIterator, build_data_iterator
from megatron.zero_bubble.trainer.tokenizer import build_tokenizer
from tests.checked_flags import data_flags

VOCAB_SIZE = 1000  # NullTokenizer: the end of a document is token 1000


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def write_tokens(prefix: Path, documents: list[list[int]]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def counting(first: int, documents: int = 40, length: int = 25) -> list[list[int]]:
    """Documents that count from `first`, one more from each to the next, and end with the end of document."""
    return [[first + document + index for index in range(length)] + [VOCAB_SIZE] for document in range(documents)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "corpus", counting(0))


def config(**settings: object) -> Arguments:
    defaults = {
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 10,
        "split": "1",
        "num_workers": 0,
    }
    return data_flags(**(defaults | settings))


def build(settings: Arguments) -> Datasets:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=VOCAB_SIZE)
    check_data(settings, tokenizer.vocab_size)
    return build_datasets(settings, tokenizer, needs_data=True)


def microbatches(settings: Arguments, count: int, consumed: int = 0, rank: int = 0, ranks: int = 1) -> list[dict]:
    with opened(settings, consumed, rank, ranks) as iterator:
        return list(islice(iterator, count))


def opened(settings: Arguments, consumed: int = 0, rank: int = 0, ranks: int = 1) -> MicrobatchIterator:
    iterator = build_data_iterator(build(settings).train, settings, consumed, rank, ranks)
    assert iterator is not None
    return iterator


def equal(left: list[dict], right: list[dict]) -> bool:
    assert [list(batch) for batch in left] == [list(batch) for batch in right]
    pairs = [(a[key], b[key]) for a, b in zip(left, right, strict=True) for key in a]
    return all(torch.equal(a, b) for a, b in pairs)


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


@pytest.mark.parametrize("masks", [set(), {"attention_mask"}])
def test_a_stage_gets_what_it_needs_and_the_middle_masks_alone(prefix: str, masks: set[str]) -> None:
    settings = config(data_path=[prefix], reset_attention_mask=bool(masks))
    iterator = build_data_iterator(build(settings).train, settings, 0, 0, 1)
    assert needed_tensors(settings, embeds=False, is_last=False) == ["attention_mask"] * bool(masks)
    given = {
        (is_first, is_last): {
            name
            for name, tensor in get_batch(iterator, settings, embeds=is_first, is_last=is_last)._asdict().items()
            if tensor is not None
        }
        for is_first in (False, True)
        for is_last in (False, True)
    }
    assert given == {
        (False, False): masks,
        (True, False): {"tokens", "position_ids"} | masks,
        (False, True): {"labels", "loss_mask"} | masks,
        (True, True): {"tokens", "position_ids", "labels", "loss_mask"} | masks,
    }


def test_first_and_last_stage_read_the_same_microbatches(prefix: str) -> None:
    settings = config(data_path=[prefix])
    datasets = build(settings)
    first, last = (build_data_iterator(datasets.train, settings, 0, 0, 1) for _ in range(2))
    for _ in range(5):
        tokens = get_batch(first, settings, embeds=True, is_last=False).tokens
        labels = get_batch(last, settings, embeds=False, is_last=True).labels
        assert torch.equal(tokens[:, 1:], labels[:, :-1])


@pytest.mark.parametrize("settings", [{}, {"variable_seq_lengths": True}, {"reset_attention_mask": True}])
def test_workers_send_the_same_microbatches_without_shared_memory(prefix: str, settings: dict) -> None:
    """The handle of a tensor in shared memory would be fetched over a socket in the middle of a forward."""
    loaded = microbatches(config(data_path=[prefix], **settings), 5)
    with opened(config(data_path=[prefix], num_workers=2, **settings)) as iterator:
        sent = list(islice(iterator, 5))
    assert equal(loaded, sent)
    assert {tensor.dtype for batch in sent for tensor in batch.values()} >= {torch.int64, torch.float32}
    assert not any(tensor.is_shared() for batch in sent for tensor in batch.values())


def test_attention_can_stop_at_the_end_of_a_document(prefix: str) -> None:
    settings = config(
        data_path=[prefix],
        reset_attention_mask=True,
        reset_position_ids=True,
        eod_mask_loss=True,
    )
    iterator = build_data_iterator(build(settings).train, settings, 0, 0, 1)
    batches = [get_batch(iterator, settings, embeds=True, is_last=True) for _ in range(5)]
    tokens, _, loss_mask, mask, positions = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    assert mask.shape == (10, 1, 16, 16)
    ends = tokens == VOCAB_SIZE
    assert ends.any()
    assert torch.equal(loss_mask == 0, ends)
    document = ends.cumsum(1) - ends.long()  # the number of the document that each token belongs to
    allowed = (document[:, :, None] == document[:, None, :]) & torch.ones(16, 16, dtype=torch.bool).tril()
    assert torch.equal(~mask[:, 0], allowed)
    assert torch.equal(positions == 0, torch.cat([torch.ones(10, 1, dtype=torch.bool), ends[:, :-1]], dim=1))


def test_data_that_is_used_up_is_no_mistake_of_the_command_line(prefix: str) -> None:
    """It is an error of the program: flags that ask for too much are refused earlier (`test_data_rest.py`)."""
    settings = config(data_path=[prefix], train_iters=1)
    iterator = build_data_iterator(build(settings).train, settings, 10**6, 0, 1)
    with pytest.raises(RuntimeError, match="the data ended"):
        get_batch(iterator, settings, embeds=True, is_last=True)


@pytest.mark.exhaustive  # test_parallelism.py trains with such batches
def test_two_ranks_share_a_batch(prefix: str, tmp_path: Path) -> None:
    """Tensor parallel: the batch is broadcast; context parallel: each rank has its half of the sequence."""
    settings = config(data_path=[prefix], reset_attention_mask=True, data_cache_path=str(tmp_path / "cache"))
    expected = microbatches(settings, 2)
    store = tmp_path / "store"
    torch.multiprocessing.spawn(_rank_of_two, (settings, str(store), str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for rank, result in enumerate(results):
        assert result["reads"] == (rank == 0)
        assert equal(result["tensor parallel"], expected)
        # Context parallel gives rank r the quarters r and 3 - r of the sequence.
        columns = torch.cat([torch.arange(16).chunk(4)[quarter] for quarter in (rank, 3 - rank)])
        assert torch.equal(result["context parallel"]["tokens"], expected[0]["tokens"][:, columns])
        assert torch.equal(result["context parallel"]["attention_mask"], expected[0]["attention_mask"][:, :, columns])
        assert "the run needs" in result["error"], "a mistake must show on every rank"


def _rank_of_two(rank: int, settings: Arguments, store: str, output: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    datasets = build(settings)
    iterator = build_data_iterator(datasets.train, settings, 0, 0, 1)
    result: dict[str, object] = {"reads": datasets.train is not None}
    batches = [get_batch(iterator, settings, embeds=True, is_last=True)._asdict() for _ in range(2)]
    result["tensor parallel"] = [{key: batch[key] for key in KEY_ORDER} for batch in batches]
    paths = settings.data_path or []
    try:
        build(config(data_path=paths * 2, train_iters=1000, data_cache_path=settings.data_cache_path))
    except ValueError as error:
        result["error"] = str(error)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    iterator = build_data_iterator(build(settings).train, settings, 0, 0, 1)
    result["context parallel"] = get_batch(iterator, settings, embeds=True, is_last=True)._asdict()
    torch.save(result, f"{output}/rank{rank}.pt")
    dist.destroy_process_group()


KEY_ORDER = ("tokens", "labels", "attention_mask", "loss_mask", "position_ids")
"""The keys of a GPTDataset's sample, in its order."""
