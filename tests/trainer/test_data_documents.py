"""Documents of different lengths as samples: what they hold, their order, and how microbatches are padded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from token_data import VOCAB_SIZE, build, config, equal, microbatches, write_tokens

from megatron.zero_bubble.runtime.microbatch_sizes import size_of
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import get_batch
from megatron.zero_bubble.trainer.data_documents import padded
from tests.ranks import be_rank, run_on_ranks
from tests.trainings import process_group

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTHS = (1, 2, 3, 8, 17, 30, 5, 11)


@pytest.fixture
def documents(tmp_path: Path) -> Arguments:
    """Data of which each document has a number of its own, and ends with the end of document."""
    tokens = [[10 * number + 1] * (length - 1) + [VOCAB_SIZE] for number, length in enumerate(LENGTHS)]
    prefix = write_tokens(tmp_path / "documents", tokens)
    return config(data_path=[prefix], variable_seq_lengths=True, global_batch_size=2)


def test_samples_are_documents_cut_at_the_sequence_length(documents: Arguments) -> None:
    train = build(documents).train
    assert len(train) == 20
    found = {}
    for sample in (train[number] for number in range(7)):
        tokens, labels = sample["tokens"], sample["labels"]
        assert torch.equal(tokens[1:], labels[:-1])
        assert torch.equal(sample["position_ids"], torch.arange(len(tokens)))
        found[int(tokens[0]) // 10] = len(tokens)
    # The document of one token has no label, and one of 30 is cut at 16.
    assert found == {number: min(length - 1, 16) for number, length in enumerate(LENGTHS) if length > 1}


def test_every_epoch_has_each_document_once_in_an_order_of_its_own(documents: Arguments) -> None:
    train = build(documents).train
    epochs = [[int(train[7 * epoch + number]["tokens"][0]) for number in range(7)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_microbatches_are_padded_to_their_longest_document(documents: Arguments) -> None:
    sizes = set()
    for batch in microbatches(documents, 7):
        lengths = [int((row > 0).sum()) for row in batch["tokens"]]
        assert batch["tokens"].shape == (2, max(lengths))
        assert batch["loss_mask"].sum(1).tolist() == lengths
        sizes.add(size_of(batch))
    assert len(sizes) > 1


def test_a_resumed_run_sees_the_rest(documents: Arguments) -> None:
    assert equal(microbatches(documents, 5)[3:], microbatches(documents, 2, consumed=6))


def test_lengths_may_have_to_be_multiples() -> None:
    samples = [{"tokens": torch.ones(length), "loss_mask": torch.ones(length)} for length in (3, 5)]
    batch = padded(samples, multiple=4)
    assert batch["tokens"].shape == batch["loss_mask"].shape == (2, 8)
    assert batch["loss_mask"].sum() == 8


def test_a_loss_at_the_end_of_a_document_may_be_left_out(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "two", [[5, VOCAB_SIZE, 7, VOCAB_SIZE]])
    given = config(data_path=[prefix], variable_seq_lengths=True, eod_mask_loss=True)
    assert build(given).train[0]["loss_mask"].tolist() == [1.0, 0.0, 1.0]


def test_data_without_a_label_is_one_line(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "short", [[5], [7]])
    with pytest.raises(ValueError, match=r"no document of .*short has two tokens$"):
        build(config(data_path=[prefix], variable_seq_lengths=True))


def test_mock_documents_differ_in_length() -> None:
    train = build(config(mock_data=True, variable_seq_lengths=True, seq_length=64)).train
    lengths = [len(train[number]["tokens"]) for number in range(50)]
    assert max(lengths) > 3 * min(lengths)
    assert max(lengths) <= 64


def as_tensor_parallel_rank(rank: int, num_ranks: int, port: int) -> None:
    be_rank(rank, num_ranks)
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        parallel_state.initialize_model_parallel(num_ranks)
        tokens = torch.arange(14).reshape(2, 7)
        given = config(variable_seq_lengths=True)
        batch = get_batch(iter([{"tokens": tokens, "position_ids": tokens}]), given, embeds=True, is_last=False)
        assert torch.equal(batch.tokens, tokens)
        parallel_state.destroy_model_parallel()


def test_tensor_parallel_ranks_are_told_the_length() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, as_tensor_parallel_rank, (store.port,), timeout=120) == 0
