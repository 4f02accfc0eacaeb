"""Builds megatron-core's GPT datasets, and gives each model chunk the tensors of a microbatch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron.zero_bubble.mcore.attention import cut_batch
from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data_documents import DocumentDataset, MockDocumentDataset, NoSampleError
from megatron.zero_bubble.trainer.data_files import SPLITS, blends_of, fingerprint


class ContentKeyedGPTDataset(GPTDataset):
    """A GPTDataset that names its cached sample index after the path of the data and the lengths of the documents.

    megatron-core names the cached sample index after the data's path and the dataset's settings, but not after the
    contents of the data. If data were tokenized again under the same path, megatron-core would use the sample index of
    the old data, and samples would be out of range or silently wrong.
    """

    def __init__(self, indexed_dataset: IndexedDataset, dataset_path: str, *args: Any) -> None:
        # dataset_path is used only for the name of the cache (MegatronDataset.unique_identifiers).
        key = f"{dataset_path}@{fingerprint(indexed_dataset.sequence_lengths)}"
        super().__init__(indexed_dataset, key, *args)


_OF_ONE_LENGTH = (ContentKeyedGPTDataset, MockGPTDataset)
"""Dataset classes in which every sample has `--seq-length` tokens: one for data in files, and one for mock data."""


@dataclass(frozen=True)
class Datasets:
    """The training, validation and test split of the data; each split is None on a rank that does not need data."""

    train: torch.utils.data.Dataset | None
    valid: torch.utils.data.Dataset | None
    test: torch.utils.data.Dataset | None
    num_samples: tuple[int, ...]
    """Number of samples of each split, the same on all ranks; 0 for a missing split, which is not evaluated."""


def build_datasets(args: Arguments, tokenizer: MegatronTokenizerBase, needs_data: bool) -> Datasets:
    """Build or load the datasets and their sample indices, and print the progress; a collective call of all ranks.

    Args:
        needs_data: whether a model chunk of this rank needs data. Only rank 0 of a tensor-parallel group reads data.
            Global rank 0 must read data, because global rank 0 writes the index cache for all ranks.

    Raises:
        ValueError: on one rank, if this rank cannot write or read the index cache; on every rank, if a split has too
            few samples.
    """
    is_built = needs_data and parallel_state.get_tensor_model_parallel_rank() == 0
    assert is_built or torch.distributed.get_rank() != 0, "rank 0 builds the index cache, so it must hold stage 0"
    requested = requested_samples(args)
    where = args.data_cache_path or ("memory" if args.mock_data else "PREFIX/cache beside the data")
    print_rank_0(f"> building datasets for at least {_by_split(requested)} samples; sample indices in {where}")
    start, logger = time.perf_counter(), logging.getLogger(gpt_dataset.__name__)
    kinds = (DocumentDataset, MockDocumentDataset) if args.variable_seq_lengths else _OF_ONE_LENGTH
    try:
        builder = BlendedMegatronDatasetBuilder(
            kinds[args.mock_data], list(requested), lambda: is_built, _dataset_config(args, tokenizer)
        )
        logger.addFilter(_is_other_warning)
        splits = builder.build()
    except NoSampleError as error:
        raise ValueError(f"--variable-seq-lengths: {error}") from error
    except Exception as error:  # megatron-core wraps an OSError into a bare Exception
        cause = error.__cause__ or error
        is_damage = not args.mock_data and isinstance(cause, (EOFError, ValueError, IndexError, UnpicklingError))
        if not is_damage and not isinstance(cause, OSError):
            raise
        remedy = f"; if files there are damaged, remove {where}: it is built again" if is_damage else ""
        raise ValueError(f"--data-cache-path: no dataset index in {where}: {one_line(cause)}{remedy}") from error
    finally:
        logger.removeFilter(_is_other_warning)
    lengths = torch.tensor([0 if split is None else len(split) for split in splits], device=own_device())
    torch.distributed.broadcast(lengths, src=0)
    num_samples = tuple(lengths.tolist())
    print_rank_0(
        f"> finished building datasets in {time.perf_counter() - start:.1f} s: {_by_split(num_samples)} samples"
    )
    # megatron-core repeats data as often as a run needs, except data in a blend without weights.
    for split, have, need in zip(SPLITS[:2], num_samples, requested, strict=False):  # nothing reads the test split
        if have < need and (have > 0 or split == "train"):
            raise ValueError(
                f"--data-path: the {split} data has {have} samples of {args.seq_length} tokens, the run needs "
                f"{need}; give weights (the data is then repeated), more data, or fewer iterations"
            )
    train, valid, test = splits
    return Datasets(train, valid, test, num_samples)


def _dataset_config(args: Arguments, tokenizer: MegatronTokenizerBase) -> GPTDatasetConfig:
    """Return megatron-core's dataset configuration for the flags `args`."""
    blends = blends_of(args)
    per_split = [blends.get(f"--{name}-data-path") for name in SPLITS]
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blends.get("--data-path"),
        blend_per_split=per_split if any(per_split) else None,
        split=args.split if args.data_path else None,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Only --reset-attention-mask needs masks [b, 1, s, s] in the data; attention is otherwise causal.
        create_attention_mask=args.reset_attention_mask,
        mmap_bin_files=not args.no_mmap_bin_files,
    )


def _is_other_warning(record: logging.LogRecord) -> bool:
    """Return False if `record` is megatron-core's warning that indices of mock data are in memory only, else True."""
    return "because path_to_cache is None" not in record.getMessage()


def _by_split(num_samples: tuple[int, ...]) -> str:
    return ", ".join(f"{split} {number}" for split, number in zip(SPLITS, num_samples, strict=True))


def requested_samples(args: Arguments) -> tuple[int, int, int]:
    """Return the numbers of training, validation and test samples of a run; `args` must have all defaults filled in."""
    evaluations = args.train_iters // args.eval_interval + 1
    per_evaluation = args.eval_iters * args.global_batch_size
    return args.train_iters * args.global_batch_size, evaluations * per_evaluation, per_evaluation


def check_rest(args: Arguments, samples: tuple[int, ...], iteration: int, used: tuple[int, int]) -> None:
    """Refuse data that ends before the last iteration of a run that resumes after iteration `iteration`.

    Args:
        samples: the number of samples in each split of this run's data.
        used: numbers of training and validation samples that the saved run has read.

    Raises:
        ValueError: too little data is left; the message is one line.
    """
    iterations, batch = args.train_iters - iteration, args.global_batch_size
    evaluations = (args.train_iters // args.eval_interval - iteration // args.eval_interval) * args.eval_iters
    of_evaluation = f"--eval-interval {args.eval_interval} --eval-iters {args.eval_iters} "
    rows = (("train", iterations, "", ""), ("valid", evaluations, of_evaluation, ", or --eval-iters 0"))
    for have, read, (split, batches, flags, instead) in zip(samples, used, rows, strict=False):
        need = batches * batch
        if need > 0 and 0 < have < read + need:
            raise ValueError(
                f"{flags}--global-batch-size {batch}: the {split} data has {have} samples for this, of which the run "
                f"in --load has used {read}, and {need} more are needed: give that run's values{instead}"
            )


class Batch(NamedTuple):
    """The tensors of one microbatch on this rank's device; a tensor that the model chunk does not need is None.

    In the shapes of the fields, b is the microbatch size, and s is `seq_length` divided by the context-parallel size.
    """

    tokens: torch.Tensor | None = None
    """Token ids, int64 [b, s], for the first stage."""
    labels: torch.Tensor | None = None
    """Labels, int64 [b, s], for the last stage."""
    loss_mask: torch.Tensor | None = None
    """Weights of the tokens in the loss, float32 [b, s], for the last stage."""
    attention_mask: torch.Tensor | None = None
    """Mask, bool [b, 1, s, seq_length], True where attention is forbidden; for every stage, if the data has masks."""
    position_ids: torch.Tensor | None = None
    """Positions, int64 [b, s], for the first stage."""


def needed_tensors(args: Arguments, *, embeds: bool, is_last: bool) -> list[str]:
    """Return the names of the `Batch` fields that a model chunk needs; a middle stage needs at most attention masks.

    Args:
        embeds: whether the chunk looks up token embeddings.
        is_last: whether the chunk computes the loss.
    """
    names = ["tokens", "position_ids"] * embeds + ["labels", "loss_mask"] * is_last
    return names + ["attention_mask"] * args.reset_attention_mask


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, args: Arguments, *, embeds: bool, is_last: bool
) -> Batch:
    """Return the tensors that a model chunk needs from the next microbatch.

    Tensor-parallel rank 0 reads and broadcasts the tensors; all ranks of the tensor-parallel group call `get_batch`.
    Without `--variable-seq-lengths`, all ranks know the shapes in advance, so that the host never waits for the device.
    With megatron-core's `broadcast_data`, the host would wait for the device twice in each call.

    Raises:
        RuntimeError: no microbatch is left in the data.
    """
    keys = needed_tensors(args, embeds=embeds, is_last=is_last)
    if not keys:
        return Batch()
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    batch = _read(data_iterator, keys) if reads else {}
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        source = parallel_state.get_tensor_model_parallel_src_rank()
        group, length = parallel_state.get_tensor_model_parallel_group(), args.seq_length
        if args.variable_seq_lengths:
            told = torch.tensor([batch[keys[0]].shape[1] if reads else 0], device=own_device())
            torch.distributed.broadcast(told, source, group=group)
            length = int(told)
        if not reads:  # make buffers for the tensors that tensor-parallel rank 0 broadcasts
            size, dtypes = (args.micro_batch_size, length), {"attention_mask": torch.bool, "loss_mask": torch.float32}
            shapes = dict.fromkeys(keys, size) | {"attention_mask": (args.micro_batch_size, 1, length, length)}
            batch = {
                key: torch.empty(shapes[key], dtype=dtypes.get(key, torch.int64), device=own_device()) for key in keys
            }
        for tensor in batch.values():
            torch.distributed.broadcast(tensor, source, group=group)
    return Batch(**cut_batch(batch))


def _read(data_iterator: Iterator[dict[str, torch.Tensor]] | None, keys: list[str]) -> dict[str, torch.Tensor]:
    assert data_iterator is not None, "a model chunk that needs data has no data iterator"
    try:
        sample = next(data_iterator)
    except StopIteration:
        raise RuntimeError("the data ended, although a check at the start of the run found enough samples") from None
    return {key: sample[key].to(own_device(), non_blocking=True) for key in keys}
