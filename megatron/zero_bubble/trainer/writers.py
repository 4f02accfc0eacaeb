"""Opens TensorBoard and Weights & Biases for the scalars of a training."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from megatron.zero_bubble.trainer.arguments import Arguments


class Writer(Protocol):
    """Records scalars over iterations or samples; TensorBoard's `SummaryWriter` is one."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...


class WandbWriter:
    """A `Writer` to Weights & Biases."""

    def __init__(self, args: Arguments) -> None:
        import wandb

        self.run = wandb.init(project=args.wandb_project, name=args.wandb_exp_name, config=vars(args))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.run.log({tag: value}, step=step)


def open_writers(args: Arguments, log_rank: int) -> list[Writer]:
    """The writers that the flags ask for; empty on all ranks but `log_rank`, which holds the loss.

    Raises:
        ValueError: the package behind a flag is not installed.
    """
    writers: list[Writer] = []
    is_writing_rank = dist.get_rank() == log_rank
    if args.tensorboard_dir is not None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard-dir needs tensorboard: pip install 'megatron-zero-bubble[tensorboard]'"
            ) from None
        if is_writing_rank:
            writers.append(SummaryWriter(args.tensorboard_dir))
    if args.wandb_project is not None:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise ValueError("--wandb-project needs wandb: pip install 'megatron-zero-bubble[wandb]'") from None
        if is_writing_rank:
            writers.append(WandbWriter(args))
    return writers
