"""A worker that the system kills ends the training with one line, wherever the training is then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from megatron.zero_bubble.session.start_up import SessionError
from megatron.zero_bubble.trainer.data_loader import MicrobatchIterator


class Counted(Dataset):
    """Sample `index` is its index; the sample `exits_at` ends the worker that reads it."""

    def __init__(self, exits_at: int | None = None) -> None:
        self.exits_at = exits_at

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.exits_at:
            os._exit(3)
        return {"tokens": torch.tensor(index)}


def opened(dataset: Counted, num_workers: int = 2) -> MicrobatchIterator:
    return MicrobatchIterator(DataLoader(dataset, num_workers=num_workers))


@pytest.fixture
def iterator() -> Iterator[MicrobatchIterator]:
    iterator = opened(Counted())
    yield iterator
    iterator.close()


def test_a_killed_worker_is_named_where_batches_are_read(iterator: MicrobatchIterator):
    next(iterator)
    [worker, _] = iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(SessionError, match=rf"--num-workers 2: .* \(process {worker.pid}\) ended with SIGKILL"):
        list(iterator)


@pytest.mark.parametrize("error", [RuntimeError("a collective failed"), ValueError("of the model")])
def test_an_error_elsewhere_is_that_of_a_killed_worker(iterator: MicrobatchIterator, error: Exception):
    def train() -> None:
        with iterator:
            next(iterator)
            worker = iterator._workers[1]
            worker.kill()
            worker.join()  # torch's handler would raise here
            raise error

    with pytest.raises(SessionError, match="SIGKILL") as raised:
        train()
    assert raised.value.__cause__ is error


def test_a_worker_killed_with_a_lock_does_not_hang_the_end(iterator: MicrobatchIterator):
    """torch's end takes the lock of an event, which each worker takes after each sample."""
    next(iterator)
    worker = iterator._workers[0]
    with iterator._batches._workers_done_event._cond:
        worker.kill()
        worker.join()
        iterator.close()
    assert all(process.exitcode for process in iterator._workers)


def test_the_end_after_a_killed_worker_leaves_no_record_with_torch(iterator: MicrobatchIterator):
    """torch would refuse the next iterator that is at the same address."""
    next(iterator)
    iterator._workers[0].kill()
    iterator._workers[0].join()
    iterator.close()
    with pytest.raises(ValueError, match="Cannot find worker information"):
        signal_handling._remove_worker_pids(id(iterator._batches))


def test_a_worker_that_exits_is_named_with_its_status():
    with (
        pytest.raises(SessionError, match=r"--num-workers 1: .* with status 3"),
        opened(Counted(3), 1) as batches,
    ):
        list(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_errors_stay_as_they_are(num_workers: int):
    def train() -> None:
        with opened(Counted(), num_workers) as batches:
            next(batches)
            raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        train()


def test_the_first_lost_worker_is_told_though_several_iterators_are_open():
    with pytest.raises(SessionError, match="status 3"), opened(Counted()), opened(Counted(0)) as lost:
        next(lost)
