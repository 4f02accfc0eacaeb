"""Trains as pretrain_gpt.py does, except that torch.distributed.pipelining runs forward and backward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state

from benchmarks.emulation.peers import peer_placements
from benchmarks.torch_pipelining import TorchForwardBackward, compute_linear_layers_in_aten
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from megatron.zero_bubble.trainer.pretrain import pretrain


def train(name: str, flags: Sequence[str], prog: str) -> None:
    """Train with pretrain_gpt.py's `flags` under the schedule `name` of torch.distributed.pipelining.

    Raises:
        ValueError: the flags are wrong, or do not fit the schedule.
    """
    args, job = complete_and_check(parse_arguments(flags, prog), os.environ, torch.cuda.is_available())
    placement = _placement(name, args, job.placement.num_chunks)
    job = replace(job, plan=None, placement=placement, is_layout_open=False)
    pretrain(replace(args, eval_iters=0), TorchSession(name, args, job, prog))


class TorchSession(Session):
    """Runs steps under the schedule `name` of torch.distributed.pipelining."""

    def __init__(self, name: str, args: Arguments, job: JobSettings, prog: str) -> None:
        super().__init__(job, prog)
        self._name, self._args = name, args

    def start(self, model: list[torch.nn.Module], *further: Any, **options: Any) -> None:
        compute_linear_layers_in_aten(model)
        super().start(model, *further, **options)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        self.run = TorchForwardBackward(self._name, model, self.job.placement, rank, self._args)
        print_rank_0(f" > in its place: torch.distributed.pipelining's {self._name}")


def _placement(name: str, args: Arguments, chunks: int) -> Placement:
    if args.world_size != args.pipeline_model_parallel_size:
        raise ValueError(
            f"torch.distributed.pipelining's schedules run here with pipeline parallelism alone: "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} is not the {args.world_size} ranks"
        )
    if args.calculate_per_token_loss or args.eod_mask_loss:
        raise ValueError("every microbatch and token weighs the same here: no --calculate-per-token-loss, no loss mask")
    if args.reset_attention_mask or args.reset_position_ids:
        raise ValueError("stages are given tokens alone here: no --reset-attention-mask, no --reset-position-ids")
    if args.mtp_num_layers is not None:
        raise ValueError("stages hold layers of one kind here: no --mtp-num-layers")
    placements = peer_placements(args.pipeline_model_parallel_size, chunks)
    if name not in placements:
        raise ValueError(f"the first argument must name a schedule: one of {', '.join(placements)}, got {name!r}")
    placement = placements[name]
    if placement.num_chunks != chunks or (chunks == 1 and placement.kind != "linear"):
        raise ValueError(
            f"{name} is not for {chunks} model chunks a rank: set --num-virtual-stages-per-pipeline-rank accordingly"
        )
    return placement
