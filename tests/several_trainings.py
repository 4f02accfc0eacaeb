"""Runs the trainings of a plan one after the other in the same processes. Started by `tests.launch`."""

from __future__ import annotations

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
    from megatron.zero_bubble.training.pretrain import pretrain

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for flags in json.loads(Path(plan).read_text()).values():
        args = parse_arguments(flags)
        complete_and_check(args, os.environ, torch.cuda.is_available())
        pretrain(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
