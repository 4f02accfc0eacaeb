"""Checkpoints, a file a rank."""

from argparse import Namespace
from pathlib import Path

import torch
from megatron.core.utils import unwrap_model


def checkpoint_of(args, folder):
    return Path(folder) / f"rank_{args.rank}.pt"


def save_checkpoint(args, model, optimizer):
    states = [chunk.state_dict() for chunk in unwrap_model(model)]
    Path(args.save, "latest_checkpointed_iteration.txt").write_text(str(args.iteration))
    torch.save((args.iteration, states, optimizer.state_dict(), vars(args)), checkpoint_of(args, args.save))


def load_checkpoint(args, model, optimizer):
    args.iteration, states, optimizer_state, _ = torch.load(checkpoint_of(args, args.load), weights_only=False)
    for chunk, state in zip(unwrap_model(model), states, strict=True):
        chunk.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)


def load_args_from_checkpoint(args, load_arg="load"):
    saved = torch.load(checkpoint_of(args, getattr(args, load_arg)), weights_only=False)[-1]
    return args, Namespace(**saved)
