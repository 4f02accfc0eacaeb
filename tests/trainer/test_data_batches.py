"""Each stage and rank gets the tensors of a microbatch that it needs, in their part for this rank."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron.core import parallel_state
from token_data import VOCAB_SIZE, build, config, equal, microbatches, opened

from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import get_batch, needed_tensors
from megatron.zero_bubble.trainer.data_loader import build_data_iterator

pytestmark = pytest.mark.usefixtures("one_rank")


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
