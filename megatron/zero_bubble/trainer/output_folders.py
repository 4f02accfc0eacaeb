"""Checks the flags of the trainer's own output and of its checkpoints."""

from __future__ import annotations

import importlib.util

from megatron.zero_bubble.session.output_places import check_places
from megatron.zero_bubble.trainer.arguments import Arguments


def check_checkpoint_and_numerics(args: Arguments) -> None:
    """Check the flags of checkpoints and of --log-numerics, and check that the file and the folder can be written.

    Raises:
        ValueError: flags contradict each other, a package is missing, or the file or the folder cannot be written.
    """
    if args.load == "":
        raise ValueError("--load '' names no place: give a path, or leave the flag out")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other"
        )
    if args.save is None and args.save_interval is not None:
        raise ValueError("--save-interval needs --save FOLDER")
    if args.save is not None and importlib.util.find_spec("psutil") is None:
        raise ValueError(
            f"--save {args.save}: megatron-core writes checkpoints only where the package psutil is installed"
        )
    check_places(args, ("save",), ("log_numerics",))
