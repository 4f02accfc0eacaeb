"""Runs the training jobs of `zero-bubble check` on one rank, one job after the other.

    python -m megatron.zero_bubble.cli.check.rank PLAN.json

Each rank needs RANK, WORLD_SIZE and LOCAL_RANK in its environment. Rank 0 records the start time and the end time of
each job in a file.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.runtime.processes import end_with_parent
from megatron.zero_bubble.session.start_up import quiet_start_up, run_program

BEGINS, ENDS = "begins", "ends"


def run_trainings(plan: dict[str, Any], folder: Path) -> None:
    rank, num_ranks, has_cuda = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    if plan["over_host"]:
        from megatron.zero_bubble.cli.check.host_collectives import stage_collectives

        stage_collectives("cuda" if has_cuda else "cpu")
    for number, (title, flags) in enumerate(plan["trainings"].items()):
        _note_progress(folder, rank, BEGINS, title)
        # Each job has its own process groups; the groups of all jobs together would have a thousand threads.
        store = dist.FileStore(str(folder / f"store{number}"), num_ranks)
        timeout = timedelta(seconds=plan["limit"])
        if has_cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(plan["backend"], store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        _meet() if flags is None else _train(flags)
        gc.collect()  # frees the model, which has cycles and holds some of the groups
        dist.destroy_process_group()
        _note_progress(folder, rank, ENDS, title)


def _meet() -> None:
    """Run one all-reduce, to test whether the communication backend can connect the ranks."""
    number = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(number)
    assert number.item() == dist.get_world_size(), "an all-reduce gives a wrong sum"


def _train(flags: Sequence[str]) -> None:
    from megatron.zero_bubble.session.session import Session
    from megatron.zero_bubble.trainer.arguments import parse_arguments
    from megatron.zero_bubble.trainer.checks import complete_and_check
    from megatron.zero_bubble.trainer.pretrain import pretrain

    args, job = complete_and_check(parse_arguments(flags), os.environ, torch.cuda.is_available())
    pretrain(args, Session(job, "zero-bubble check"))


def _note_progress(folder: Path, rank: int, event: str, title: str) -> None:
    if rank == 0:
        with open(folder / "progress.jsonl", "a") as file:
            file.write(json.dumps([event, title, time.time()]) + "\n")


def main(plan: Path) -> None:
    end_with_parent()
    quiet_start_up()
    substitute_cuda()
    run_trainings(json.loads(plan.read_text()), plan.parent)


if __name__ == "__main__":
    sys.exit(run_program("zero-bubble check", lambda: main(Path(sys.argv[1]))))
