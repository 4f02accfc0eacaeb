"""Keeps the results of megatron-core's checkpoint writers in the process, for every version that the launcher runs."""

from __future__ import annotations

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def keep_results_in_process() -> None:
    """Let megatron-core's checkpoint writer return its results through a queue in this process.

    By default megatron-core starts a server process for them at the first save: it takes 150 MB a rank, and nobody ends
    it when the rank is killed. Asynchronous saves need that server: call this only in a job that makes none.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
