"""Chooses the layout of a training whose flags leave it open, before the model is built."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from megatron.zero_bubble.mcore.checkpoint_reading import read_common
from megatron.zero_bubble.mcore.placement import adopt_placement
from megatron.zero_bubble.mcore.unit_costs import SECONDS
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layout_choice import ChosenLayout, saved_choice
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint_files import checkpoint_folder, latest_iteration
from megatron.zero_bubble.trainer.data import DataConfig
from megatron.zero_bubble.trainer.initialize import seed_everything
from megatron.zero_bubble.trainer.unit_models import measured_costs, profiled_costs


def settle_layout(args: Arguments, session: Session, data_config: DataConfig) -> Arguments:
    """Choose what the flags leave open of the layout, and adopt its placement; a collective call.

    It is called inside of `initialized`, before anything is built. The random states are then those of a run that
    began with the chosen layout. A job that goes on from a checkpoint keeps the
    layout that was chosen for it, so that it continues with the same numbers.

    Returns:
        The flags of the layout.

    Raises:
        ValueError: no layout fits in the memory, or a flag does not work with the chosen one.
    """
    if not session.job.is_layout_open:
        return args

    def costs(profile: Profile | None) -> ModelCosts:
        if profile is not None:
            return profiled_costs(args, data_config, profile)
        print_rank_0(f" > timing the model's layers for {SECONDS:g} seconds, to choose their layout ...")
        return measured_costs(args, data_config)

    chosen = _saved_choice(args, session.job.flags)
    if chosen is not None:
        print_rank_0(f" > layout: that of the checkpoint in --load {args.load}")
    args = replace(args, **session.choose_layout(chosen, costs, args.padded_vocab_size))
    adopt_placement(session.job.placement)
    seed_everything(args.seed)
    return args


def _saved_choice(args: Arguments, job_flags: JobFlags) -> ChosenLayout | None:
    """The layout that was chosen for the job whose checkpoint this one loads; None for a new job or other ranks."""
    if not args.load or args.finetune:
        return None
    folder = checkpoint_folder(args.load, on_rank(0, lambda: latest_iteration(str(args.load))))
    saved: Namespace = on_rank(0, lambda: read_common(folder))["args"]
    return saved_choice(saved, job_flags)
