"""megatron-core's checkpoint writers start no process, which could die unnoticed or stay behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launch import environment

SAVE = """
import multiprocessing, os, sys
import psutil, torch, torch.distributed as dist
from megatron.zero_bubble.mcore.cpu import substitute_cuda

def sync(descriptor):
    written.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
    children.extend(psutil.Process().children())
    return real_sync(descriptor)

if __name__ == "__main__":
    written, children, real_sync, os.fsync = set(), [], os.fsync, sync
    substitute_cuda()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.zero_bubble.mcore.checkpoint_writing import results_in_a_fork, written_in_threads

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = torch.arange(6.0)
    state = {"weight": ShardedTensor.from_rank_offsets("weight", weight)}
    for name in ("first", "second"):
        with written_in_threads(keep_results=True):
            dist_checkpointing.save(state, f"{sys.argv[1]}/{name}")
        assert filesystem_async._results_queue is None
        loaded = {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(6))}
        assert torch.equal(dist_checkpointing.load(loaded, f"{sys.argv[1]}/{name}")["weight"], weight)
    with results_in_a_fork():
        put = filesystem_async._results_queue.put
        writer = multiprocessing.get_context("fork").Process(target=put, args=("written",))
        writer.start(), writer.join()
        assert filesystem_async._results_queue.get(timeout=60) == "written"
    assert filesystem_async._results_queue is None
    writers = dict(vars(filesystem_async.FileSystemWriterAsync))
    first, second = (written_in_threads(keep_results=False) for _ in range(2))
    first.__enter__(), second.__enter__()
    assert vars(filesystem_async.FileSystemWriterAsync) != writers
    first.__exit__(None, None, None), second.__exit__(None, None, None)
    assert vars(filesystem_async.FileSystemWriterAsync) == writers
    assert "__0_0.distcp" in written, written
    print("children:", children + psutil.Process().children())
"""


def test_saving_starts_no_process(tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(SAVE)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "children: []\n" in result.stdout
