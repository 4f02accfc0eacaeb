"""Runs megatron-core's checkpoint writers as threads of the process that saves, in every supported version."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

_NAMES = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
"""Names of the method that writes a rank's files: up to 0.16, and from 0.17 on."""


def write_in_threads(*, keep_results: bool) -> None:
    """Let megatron-core write each file of a checkpoint in a thread; call it before the first save.

    megatron-core 0.16 forks a process for each file, and waits for ever when the system kills one that needs too much
    memory. From 0.17 on it starts threads, but an error in one of them ends its rank while the others wait for it.

    Args:
        keep_results: also return the results of the writers through a queue in this process. By default megatron-core
            starts a server process for them at the first save: it takes 150 MB a rank, and nobody ends it when the rank
            is killed. Asynchronous saves need that server.
    """
    for name in _NAMES:
        if hasattr(FileSystemWriterAsync, name):
            setattr(FileSystemWriterAsync, name, staticmethod(write_files))
    if keep_results and filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def write_files(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write the files of a rank, and put the results of each file, or the first error, into the queue `results`.

    Args:
        transforms: of the bytes that are written.
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
