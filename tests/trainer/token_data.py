"""Tokens in files, and the datasets and microbatches that a job makes of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import Datasets, build_datasets
from megatron.zero_bubble.trainer.data_files import check_data
from megatron.zero_bubble.trainer.data_loader import MicrobatchIterator, build_data_iterator
from megatron.zero_bubble.trainer.tokenizer import NullTokenizer
from tests.checked_flags import data_flags

VOCAB_SIZE = 1000  # NullTokenizer: the end of a document is token 1000


def write_tokens(prefix: Path, documents: list[list[int]]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def counting(first: int, documents: int = 40, length: int = 25) -> list[list[int]]:
    """Documents that count from `first`, one more from each to the next, and end with the end of document."""
    return [[first + document + index for index in range(length)] + [VOCAB_SIZE] for document in range(documents)]


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
    tokenizer = NullTokenizer(VOCAB_SIZE)
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
