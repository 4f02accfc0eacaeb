"""How megatron-core's writers of checkpoints hand over what they have done, in every version that the launcher runs."""

from __future__ import annotations

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def keep_results_in_process() -> None:
    """Let the writer hand its results over within this process, which is where a synchronous save writes.

    Otherwise megatron-core starts a server process for them with the first save, 150 MB a rank, that nobody ends when
    the rank is killed. A save in the background needs it: call this only where there are none.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
