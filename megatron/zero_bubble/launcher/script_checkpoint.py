"""Reads the layout of the checkpoint from which a script continues, and refuses a checkpoint of another layout."""

from __future__ import annotations

import contextlib
import copy
import io
from argparse import Namespace
from pathlib import Path

from megatron.zero_bubble.runtime.joint import jointly
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.start_up import SessionError, users_mistakes

_RESHARDED = "torch_dist"
"""Format of checkpoints that load into every layout."""
_TRACKER = "latest_checkpointed_iteration.txt"


def given_checkpoint(script: Namespace) -> str | None:
    """Name of the script argument whose folder has the checkpoint to load; None if the script loads no checkpoint."""
    for name in ("load", "pretrained_checkpoint"):
        folder = getattr(script, name, None)
        if folder and Path(folder, _TRACKER).is_file():
            return name
    return None


def other_format(script: Namespace, name: str) -> str | None:
    """Return the format of the checkpoint in the script argument `name`; None if it loads into every layout.

    Megatron-LM also reads the format torch if `--ckpt-format` is torch_dist.
    """
    folder, step = Path(getattr(script, name)), getattr(script, "ckpt_step", None)
    iteration = (folder / _TRACKER).read_text().strip() if step is None else str(step)
    files = folder / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)
    kind = str(getattr(script, "ckpt_format", "torch"))
    if files.is_dir():
        has_shards = (files / "metadata.json").is_file()
        kind = _RESHARDED if has_shards else "torch" if kind == _RESHARDED else kind
    return None if kind == _RESHARDED else kind


def saved_arguments(script: Namespace, name: str) -> Namespace | None:
    """Return the arguments in the checkpoint; None if the checkpoint has no arguments. A collective call.

    Args:
        name: name of the script argument whose folder has the checkpoint.
    """

    def read() -> Namespace | None:
        from megatron.training.checkpointing import load_args_from_checkpoint

        # A collective call, which changes the given arguments in place. If the checkpoint has arguments, the
        # result is a pair of the given arguments and the checkpoint's arguments.
        with contextlib.redirect_stdout(io.StringIO()):
            result = load_args_from_checkpoint(copy.copy(script), load_arg=name)
        return result[1] if isinstance(result, tuple) else None

    return jointly(read)


@users_mistakes()
def check_chunks_of_checkpoint(script: Namespace, num_chunks: int) -> None:
    """Refuse a checkpoint whose ranks have another number of model chunks; a collective call.

    Megatron-LM loads a checkpoint of one file a rank without the chunks that the checkpoint lacks. These chunks then
    keep their initial weights.

    Args:
        num_chunks: number of model chunks on each rank of this job.

    Raises:
        SessionError: the checkpoint does not fit the job.
    """
    name = given_checkpoint(script)
    if name is None or (kind := other_format(script, name)) is None:
        return
    if (saved := saved_arguments(script, name)) is None:
        return
    was = getattr(saved, "virtual_pipeline_model_parallel_size", None) or 1
    if was != num_chunks:
        raise SessionError(
            f"{flag_name(name)} {getattr(script, name)}: the checkpoint of format {kind} has {was} chunks a rank, and "
            f"this job has {num_chunks}: choose a schedule with {was} chunks a rank, or save the checkpoint under such "
            f"a schedule again with --ckpt-format {_RESHARDED}, which fits every schedule"
        )
