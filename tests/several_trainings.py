"""Runs the trainings of a plan one after the other in the same processes. Started by `tests.launch`."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.cpu import substitute_cuda


def main(plan: str) -> None:
    substitute_cuda()
    from megatron.zero_bubble.training.arguments import parse_arguments
    from megatron.zero_bubble.training.checks import complete_and_check
    from megatron.zero_bubble.training.initialize import print_rank_0
    from megatron.zero_bubble.training.pretrain import pretrain

    gc.freeze()  # the modules: collecting them takes a second
    for number, (name, flags) in enumerate(json.loads(Path(plan).read_text()).items()):
        args = parse_arguments(flags)
        complete_and_check(args, os.environ, torch.cuda.is_available())
        # Each training in process groups of its own: those of all together would have a thousand threads.
        store = dist.FileStore(f"{plan}.{number}.store", args.world_size)
        dist.init_process_group(args.distributed_backend, store=store, rank=args.rank, world_size=args.world_size)
        print_rank_0(f"training {name}")
        pretrain(args)
        gc.collect()  # the model holds some of the groups, and has cycles
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
