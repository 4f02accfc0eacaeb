"""Writes checkpoints in torch_dist format with threads; if writing fails on one rank, every rank raises an error."""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import CheckpointException

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError, first_sentence
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.runtime.joint import jointly, raise_first

_ONLY_ON_RANK_0 = (
    # `save_common` is a method up to megatron-core 0.16 and a function up to 0.18; later versions write no `common.pt`.
    (getattr(common_strategies, "TorchCommonSaveStrategy", serialization), "save_common"),
    (filesystem_async.FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)
"""The functions that write `common.pt`, `.metadata` and `metadata.json`; only rank 0 writes these files."""


def save(state: dict[str, Any], folder: Path, content_metadata: dict[str, Any]) -> None:
    """Write each rank's part of `state` to an empty folder; a collective call of all ranks.

    Raises:
        CheckpointError: raised on every rank, if any rank cannot write its part of the checkpoint.
    """
    with written_in_threads(keep_results=True), _failures_after_the_end() as failures:
        try:
            dist_checkpointing.save(state, str(folder), content_metadata=content_metadata)
        except CheckpointException as error:
            # The error is raised on every rank, because the ranks have exchanged the errors of their writers.
            failures += [_failure(failed) for failed, _ in error.failures.values()]
    jointly(lambda: raise_first(failures, None))


def _failure(error: BaseException) -> CheckpointError:
    """Return a `CheckpointError`, with a message of one line, for an error that ended a write."""
    text = first_sentence(error).removeprefix("Worker failure: ")
    is_short = "inline_container.cc" in text
    return CheckpointError("a write failed, as on a full disk" if is_short else re.sub(r"^\[Errno \d+\] ", "", text))


@contextmanager
def _failures_after_the_end() -> Iterator[list[CheckpointError]]:
    """Collect errors in writing rank 0's own files, so that rank 0 still takes part in the save's collective calls."""
    failures: list[CheckpointError] = []
    with ExitStack() as stack:
        for owner, name in _ONLY_ON_RANK_0:
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, _noted(failures)(getattr(owner, name))))
        yield failures


@contextmanager
def _noted(failures: list[CheckpointError]) -> Iterator[None]:
    """Append an error of the decorated function to `failures`, instead of raising the error."""
    try:
        yield
    except Exception as error:
        failures.append(_failure(error))


_NAMES = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
"""Names of megatron-core's method that writes a rank's files: `..._multiproc` up to 0.16, then `..._multithread`."""


@contextmanager
def written_in_threads(*, keep_results: bool) -> Iterator[None]:
    """Let megatron-core write each file of a checkpoint in a thread, for saves inside the `with` block.

    megatron-core 0.16 forks a process for each file, and waits forever if the system kills the forked process for lack
    of memory. From 0.17 on, megatron-core starts threads, but an error in a thread ends the process of the rank, so
    that the other ranks wait forever.

    Args:
        keep_results: whether the writing threads put their results into a queue in the rank's own process. If
            `keep_results` is false, megatron-core starts a server process for the results at the first save.
            megatron-core's server process takes 150 MB of memory on each rank, and survives if the rank's process is
            killed. Asynchronous saves write in another process, so `keep_results` must be false for asynchronous
            saves; see also `results_in_a_fork`.
    """
    with ExitStack() as changes:
        for name in _NAMES:
            if getattr(FileSystemWriterAsync, name, write_files) is not write_files:
                changes.enter_context(replaced(FileSystemWriterAsync, name, staticmethod(write_files)))
        if keep_results and filesystem_async._results_queue is None:
            changes.enter_context(replaced(filesystem_async, "_results_queue", queue.Queue()))
        yield


@contextmanager
def results_in_a_fork() -> Iterator[None]:
    """Let asynchronous saves put their results into a queue in a forked process, for saves inside the `with` block.

    megatron-core starts a process that imports the training script, and that fails without the CPU substitutions.
    """
    with get_context("fork").Manager() as manager, replaced(filesystem_async, "_results_queue", manager.Queue()):
        yield


def write_files(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write this rank's files of a checkpoint, and put the results, or the first error, into the queue `results`.

    Args:
        transforms: transformations of the bytes that are written.
        use_msc: whether to write through multistorageclient.
        buckets: path and contents of each file.
    """
    written: queue.Queue[tuple[int, Any]] = queue.Queue()

    def write(index: int) -> None:
        unfinished: queue.Queue[int] = queue.Queue()
        unfinished.put(index)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, index, buckets[index], written, unfinished, use_fsync=True, use_msc=use_msc
        )

    try:
        with ThreadPoolExecutor(len(buckets)) as threads:
            list(threads.map(write, range(len(buckets))))
        outcomes = dict(written.get_nowait() for _ in buckets)
        results.put(next((outcome for outcome in outcomes.values() if isinstance(outcome, Exception)), outcomes))
    except Exception as error:
        results.put(error)
