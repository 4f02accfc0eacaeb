"""Trains as pretrain_gpt.py does, except that torch.distributed.pipelining runs forward and backward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from megatron.core import parallel_state

from benchmarks.emulation.peers import peer_placements
from benchmarks.torch_pipelining import TorchForwardBackward, compute_linear_layers_in_aten
from megatron.zero_bubble.job.start_up import print_rank_0
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments, parse_arguments
from megatron.zero_bubble.training.checkpoint import Checkpointer
from megatron.zero_bubble.training.checks import complete_and_check
from megatron.zero_bubble.training.initialize import initialized
from megatron.zero_bubble.training.logging import TrainingLog
from megatron.zero_bubble.training.loop import Trainer
from megatron.zero_bubble.training.model import build_model, transformer_config
from megatron.zero_bubble.training.numerics import NumericsLog
from megatron.zero_bubble.training.optimization import build_lr_scheduler, build_optimizer
from megatron.zero_bubble.training.pretrain import load_tokenizer, make_data_config, open_data, with_vocabulary
from megatron.zero_bubble.training.progress import Progress


def train(name: str, flags: Sequence[str], prog: str) -> None:
    """Train with pretrain_gpt.py's `flags` under torch.distributed.pipelining's schedule `name`.

    Raises:
        ValueError: the flags are wrong, or do not fit this schedule.
    """
    args, job = complete_and_check(parse_arguments(flags, prog), os.environ, torch.cuda.is_available())
    placement = _placement(name, args, job.placement.num_chunks)
    log_rank, progress = placement.rank_of(placement.num_stages - 1), Progress()
    data_config = make_data_config(args)
    tokenizer = load_tokenizer(args)
    args = replace(with_vocabulary(args, tokenizer.vocab_size), eval_iters=0)
    data_config.validate(tokenizer.vocab_size)
    with initialized(args, placement), ExitStack() as resources:
        config = transformer_config(args, placement.num_chunks, None)
        model = build_model(args, config, placement, None)
        compute_linear_layers_in_aten(model)
        optimizer = build_optimizer(args, model, config)
        scheduler = build_lr_scheduler(args, optimizer)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        print_rank_0(f" > pipeline schedule: torch.distributed.pipelining's {name}")
        trainer = Trainer(
            args,
            progress,
            model,
            optimizer,
            scheduler,
            TorchForwardBackward(name, model, placement, rank, args, data_config),
            data_config,
            *open_data(args, progress, data_config, tokenizer, model, resources),
            Checkpointer(args, progress, model, optimizer, scheduler),
            TrainingLog(args, progress, [], log_rank),
            NumericsLog(args.log_numerics, progress.iteration, log_rank) if args.log_numerics else None,
        )
        trainer.train()


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
