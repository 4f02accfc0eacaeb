"""Mistakes in paths, weights and splits, found before training starts, each in one line."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.zero_bubble.trainer import data_files
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data_files import check_data, fingerprint, open_token_file, parse_blend
from tests.checked_flags import data_flags

VOCAB_SIZE = 100


def write_tokens(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    """A .bin/.idx pair through megatron-core's builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document), [len(document)] if document else [])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Twenty documents of ten tokens."""
    return write_tokens(tmp_path / "corpus", [[token] * 10 for token in range(20)])


def config(**settings: object) -> Arguments:
    defaults = {"seq_length": 16, "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 3, "split": "1"}
    return data_flags(**(defaults | settings))


def refused(**settings: object) -> str:
    """The message of the error: one line."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
        check_data(config(**settings), VOCAB_SIZE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_settings_pass(prefix: str) -> None:
    check_data(config(data_path=[prefix]), VOCAB_SIZE)
    check_data(config(data_path=["0.5", prefix, "2", prefix], split="80, 10, 10"), VOCAB_SIZE)
    check_data(config(train_data_path=[prefix], valid_data_path=[prefix], split=Arguments.split), VOCAB_SIZE)
    check_data(config(mock_data=True), VOCAB_SIZE)


def test_a_checked_file_knows_its_lengths(prefix: str) -> None:
    file = open_token_file(prefix, "--data-path")
    assert file.lengths.tolist() == [10] * 20
    assert file.dtype == np.uint16
    assert file.has_tokens(5, 10, 50)
    assert not file.has_tokens(5, 10, 51)


def test_missing_files_are_named(prefix: str) -> None:
    assert f"--data-path: no such file: {prefix}x.idx" in refused(data_path=[prefix + "x"])
    assert "give the prefix without .bin or .idx" in refused(data_path=[prefix + ".bin"])
    os.remove(prefix + ".bin")
    assert f"--valid-data-path: no such file: {prefix}.bin" in refused(
        split=Arguments.split, train_data_path=[write_tokens(Path(prefix + "2"), [[1, 2]])], valid_data_path=[prefix]
    )


@pytest.mark.parametrize(
    ("suffix", "size", "message"),
    [
        (".idx", 0, "corpus.idx is truncated: 0 bytes, less than its header"),
        (".idx", 20, "corpus.idx is truncated: 20 bytes, less than its header"),
        (".idx", -1, "corpus.idx is truncated: 441 bytes, its header announces 442"),
        (".bin", -1, "corpus.bin is truncated: 399 bytes, its index announces 400"),
        (".bin", 0, "corpus.bin is truncated: 0 bytes, its index announces 400"),
    ],
)
def test_truncated_files_are_named_with_their_sizes(prefix: str, suffix: str, size: int, message: str) -> None:
    os.truncate(prefix + suffix, size if size >= 0 else os.path.getsize(prefix + suffix) + size)
    assert message in refused(data_path=[prefix])


@pytest.mark.parametrize("value", [-1, 2**30])
@pytest.mark.parametrize("sequence", [0, 5, 8])
def test_a_damaged_index_is_named_with_its_first_wrong_sequence(prefix: str, sequence: int, value: int) -> None:
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(34 + 4 * sequence)
        file.write(struct.pack("<i", value))
    message = f"corpus.idx is damaged: sequence {sequence} does not end where the next begins"
    assert message in refused(data_path=[prefix])


def test_a_file_that_is_no_index_is_refused(prefix: str) -> None:
    Path(prefix + ".idx").write_bytes(b"PK\x03\x04" * 100)
    assert "is not an index file of Megatron" in refused(data_path=[prefix])


def test_an_index_without_documents_is_refused(tmp_path: Path) -> None:
    assert "holds no documents" in refused(data_path=[write_tokens(tmp_path / "empty", [])])


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    too_large = write_tokens(tmp_path / "large", [[1, VOCAB_SIZE]])
    assert f"holds token id {VOCAB_SIZE}, but the tokenizer has {VOCAB_SIZE}" in refused(data_path=[too_large])
    negative = write_tokens(tmp_path / "negative", [[1, -5]], np.int32)
    assert "holds token id -5" in refused(data_path=[negative])


@pytest.mark.parametrize(
    "values", [["0.3", "a", "b"], ["0.3", "a", "b", "c"], ["a", "0.3"], ["0.3"], ["0.3", "a", "0.7", "b", "c"]]
)
def test_weights_go_with_every_prefix_or_with_none(values: list[str]) -> None:
    assert "either prefixes only, or WEIGHT PREFIX pairs" in refused(data_path=values)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_weights_are_positive_numbers(weight: str) -> None:
    assert "weights must be positive" in refused(data_path=[weight, "a", "1", "b"])


def test_prefixes_may_come_alone_in_any_number() -> None:
    assert parse_blend(["a", "b"], "--data-path") == (["a", "b"], None)
    assert parse_blend(["3", "a", "1", "b"], "--data-path") == (["a", "b"], [3.0, 1.0])


@pytest.mark.parametrize("split", ["1,1,1,1", "a,b", "", "98;2", "-1,2", "inf", "1,,2"])
def test_a_split_is_up_to_three_shares(prefix: str, split: str) -> None:
    assert f"--split {split}: give up to three shares" in refused(data_path=[prefix], split=split)


def test_a_split_without_training_data_is_refused(prefix: str) -> None:
    assert "--split 0,1: the share of the training data is 0" in refused(data_path=[prefix], split="0,1")


def test_a_split_too_small_for_one_document_is_refused_as_its_index_would_never_end(prefix: str) -> None:
    message = refused(data_path=[prefix], split="98,1,1")
    assert "--split 98,1,1: the valid split gets 0 of the 20 documents" in message


def test_without_weights_every_part_of_a_blend_must_hold_a_sample(prefix: str, tmp_path: Path) -> None:
    small = write_tokens(tmp_path / "small", [[1] * 16])
    check_data(config(data_path=["1", prefix, "1", small]), VOCAB_SIZE)
    assert "fewer than 17 tokens" in refused(data_path=[prefix, small])
    assert "fewer than 17 tokens" in refused(train_data_path=[prefix, small], split=Arguments.split)


def test_data_of_each_split_is_given_for_training_too_and_not_cut_again(prefix: str) -> None:
    assert "need --train-data-path" in refused(valid_data_path=[prefix])
    assert "--split 9,1 cuts --data-path" in refused(train_data_path=[prefix], split="9,1")


@pytest.mark.parametrize("change", [lambda x: x.append(3), lambda x: x.pop(), lambda x: x.__setitem__(-1, 4)])
def test_the_fingerprint_sees_a_change_of_lengths(change: Callable[[list[int]], object]) -> None:
    lengths = [5] * 3_000_000
    before = fingerprint(np.array(lengths, dtype=np.int32))
    assert fingerprint(np.array(lengths, dtype=np.int32)) == before
    change(lengths)
    assert fingerprint(np.array(lengths, dtype=np.int32)) != before


def test_files_that_cannot_be_read_are_named(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*unused: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(np, "fromfile", forbidden)
        assert refused(data_path=[prefix]) == f"--data-path {prefix}.bin: cannot be read: Permission denied"
    monkeypatch.setattr(data_files, "open", forbidden, raising=False)
    assert refused(data_path=[prefix]) == f"--data-path {prefix}.idx: cannot be read: Permission denied"
