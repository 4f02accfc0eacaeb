"""Loads microbatches in worker processes, which end when their iterator is closed or the training process ends.

Each data-parallel rank reads its samples in Megatron-LM's order. A resumed run skips the first `consumed_samples`
samples of the dataset, which earlier runs have used. The global batch size may change during a run (ramp-up), because
the batch size determines only the number of microbatches in a step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils import signal_handling

from megatron.zero_bubble.runtime.look_ahead import LookAhead
from megatron.zero_bubble.session.start_up import SessionError
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data_documents import padded

_Collate = Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]
_SECONDS_TO_DIE = 1.0
"""Seconds to wait after an error of a loader, because the worker that caused the error may not have ended yet."""


class MicrobatchIterator(LookAhead[dict[str, torch.Tensor]]):
    """Iterates over the microbatches of a `DataLoader` until the `with` block ends or `close()` is called.

    The code that makes a `MicrobatchIterator` must close the iterator. The workers of an unclosed iterator keep running
    while a traceback, a reference cycle or a signal handler refers to the iterator. Python waits for the workers of
    unclosed iterators before Python exits.

    If a worker has failed, for example because the system killed it, the next failed read raises a `SessionError` that
    names the worker. After a worker has failed, any other error inside the `with` block also becomes a `SessionError`
    that names the worker. The iterator does not install torch's SIGCHLD handler. When a worker ends, torch's SIGCHLD
    handler raises an error at an arbitrary instruction of the training process. The error that torch's SIGCHLD handler
    raises can be lost, or can leave a lock held.
    """

    def __init__(self, loader: DataLoader) -> None:
        handler = signal.getsignal(signal.SIGCHLD)
        self._batches = iter(loader)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        # With num_workers 0, this process loads the data itself and has no workers.
        self._workers: list[BaseProcess] = getattr(self._batches, "_workers", [])
        super().__init__(iter(self._load, None))

    def _load(self) -> dict[str, torch.Tensor]:
        try:
            return {name: torch.as_tensor(values) for name, values in next(self._batches).items()}
        except (OSError, EOFError, RuntimeError) as error:
            self._raise_if_worker_ended(error, _SECONDS_TO_DIE)
            raise

    def __enter__(self) -> MicrobatchIterator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error is not None and not isinstance(error, SessionError):
                self._raise_if_worker_ended(error, 0)
        finally:
            self.close()

    def _raise_if_worker_ended(self, error: BaseException, seconds: float) -> None:
        """Raise `SessionError` if a worker has failed, or fails within `seconds` seconds."""
        end = time.monotonic() + seconds
        while not (lost := self._lost_workers()):
            if time.monotonic() >= end:
                return
            time.sleep(0.01)
        code = lost[0].exitcode
        assert code is not None
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        raise SessionError(
            f"--num-workers {len(self._workers)}: a worker that loads data (process {lost[0].pid}) ended with {how}; "
            "if memory ran out (see the system's log), give fewer workers or 0"
        ) from error

    def _lost_workers(self) -> list[BaseProcess]:
        return [worker for worker in self._workers if worker.exitcode]

    def close(self) -> None:
        """End the worker processes, by SIGKILL if needed. A second call of `close` does nothing."""
        if not self._workers:
            return
        batches: Any = self._batches
        if not self._lost_workers():
            batches._shutdown_workers()
        elif not batches._shutdown:
            # torch ends its workers through an event. A killed worker may hold the event's lock, for which torch would
            # wait forever. torch also records the workers by the address of the iterator, and refuses a later iterator
            # at a recorded address.
            batches._shutdown = True
            signal_handling._remove_worker_pids(id(batches))
        for worker in self._workers:
            worker.kill()  # workers ignore SIGTERM, which torch has sent
            worker.join()


def sample_indices(
    total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Yield the sample indices of each microbatch of one data-parallel rank, in the order of the dataset.

    The data-parallel ranks take microbatches from the dataset in turn. Samples at the end of the dataset that do not
    fill a microbatch for every rank are dropped.
    """
    round_size, offset = micro_batch_size * num_ranks, rank * micro_batch_size
    for start in range(consumed_samples, total_samples - round_size + 1, round_size):
        yield list(range(start + offset, start + offset + micro_batch_size))


def build_data_iterator(
    dataset: Dataset | None, args: Arguments, consumed_samples: int, rank: int, num_ranks: int
) -> MicrobatchIterator | None:
    """Return an iterator over a data-parallel rank's microbatches after the first `consumed_samples` samples.

    Each model chunk that reads data needs a separate iterator. The iterator yields CPU tensors of shape
    [micro_batch_size, seq_length], or shorter tensors with `variable_seq_lengths`.

    Returns:
        The iterator; None if the dataset is None or empty.
    """
    total_samples = 0 if dataset is None else len(dataset)  # type: ignore[arg-type]  # Dataset declares no __len__
    if dataset is None or not total_samples:
        return None
    collate: _Collate = default_collate
    if args.variable_seq_lengths:
        # The length is padded to a multiple of `multiple`, so that tensor- and context-parallel ranks get equal parts.
        multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
        multiple *= 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
        collate = partial(padded, multiple=multiple)
    indices = sample_indices(total_samples, consumed_samples, args.micro_batch_size, rank, num_ranks)
    loader: DataLoader = DataLoader(
        dataset,
        batch_sampler=indices,
        num_workers=args.num_workers,
        collate_fn=collate if torch.cuda.is_available() else partial(_as_arrays, collate),
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_ignore_stop_signals,
        # The loader draws its workers' seed from this generator. A draw from the global generator would change the run.
        generator=torch.Generator().manual_seed(args.seed),
    )
    return MicrobatchIterator(loader)


def _as_arrays(collate: _Collate, samples: list[dict[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Join samples into a microbatch of numpy arrays, which a worker sends through its pipe.

    If a worker sent tensors, torch would put the tensors in shared memory, and the training process would fetch each
    tensor's handle over a socket in the middle of a forward. With pinned memory, the workers can send tensors instead
    of arrays, because torch's pinning thread fetches the handles of the tensors.
    """
    return {name: tensor.numpy() for name, tensor in collate(samples).items()}


def _ignore_stop_signals(worker: int) -> None:
    """Make a worker ignore SIGINT and SIGTERM, so that training can finish the iteration and save a checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
