"""Loads microbatches in worker processes, which end when the iterator is closed or the training process is gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.zero_bubble.trainer.data_config import DataConfig
from megatron.zero_bubble.trainer.data_samplers import CyclicSampler, SequentialSampler


class MicrobatchIterator(Iterator[dict[str, torch.Tensor]]):
    """Iterates over the microbatches of a loader, until `close()`.

    The owner must close the iterator. Otherwise the workers live on while a traceback, a cycle or a signal handler
    refers to the iterator, and Python waits for them at its exit.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._batches = iter(loader)

    def __next__(self) -> dict[str, torch.Tensor]:
        return next(self._batches)

    def close(self) -> None:
        """End the worker processes, by force if needed. A second call does nothing."""
        shut_down = getattr(self._batches, "_shutdown_workers", None)
        if shut_down is None:
            return  # with num_workers 0 this process loads
        shut_down()
        for worker in self._batches._workers:  # type: ignore[attr-defined]
            worker.kill()  # workers ignore SIGTERM, with which torch asked them to end
            worker.join()


def build_data_iterator(
    dataset: Dataset | None,
    config: DataConfig,
    consumed_samples: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> MicrobatchIterator | None:
    """An iterator over the microbatches after `consumed_samples` samples; None if there is no dataset.

    Each model chunk that reads needs an iterator of its own. It yields CPU tensors [micro_batch_size, seq_length].
    """
    if dataset is None or len(dataset) == 0:  # type: ignore[arg-type]  # Dataset declares no __len__
        return None
    sampler_class = CyclicSampler if config.dataloader_type == "cyclic" else SequentialSampler
    sampler = sampler_class(
        len(dataset),  # type: ignore[arg-type]
        consumed_samples,
        config.micro_batch_size,
        data_parallel_rank,
        data_parallel_size,
    )
    loader: DataLoader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=config.num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_ignore_stop_signals,
        # The loader draws its workers' seed from this generator; drawing from the global one would change the run.
        generator=torch.Generator().manual_seed(config.seed),
    )
    return MicrobatchIterator(loader)


def _ignore_stop_signals(worker: int) -> None:
    """Let a worker ignore signals to its process group, because its rank may have to save a checkpoint first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
