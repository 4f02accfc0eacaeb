"""Reads and checks the arguments of a user's Megatron-LM script, which `python -m megatron.zero_bubble` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from megatron.zero_bubble.cli.invocation import names_in
from megatron.zero_bubble.launcher.command_line import (
    ShapeFlags,
    check_script_arguments,
    complete_script_arguments,
    parse_command_line,
)
from megatron.zero_bubble.session.flag_parser import flag, take_flags

_REFUSED = {
    "--yaml-cfg": "Megatron-LM then ignores all other flags, including the benchmark's flags",
    "--use-checkpoint-args": "the benchmark loads no checkpoint; give the flags of the model",
    "--step-batch-size-schedule": "all iterations of the benchmark have one batch size; give --global-batch-size",
}
"""Flag of Megatron-LM that the benchmark refuses -> the reason for the refusal."""
_TRAINER = Path(__file__).resolve().parents[4] / "pretrain_gpt.py"


@dataclass(frozen=True)
class _ScriptSizes(ShapeFlags):
    """The numbers of ranks, stages, layers, microbatches, tokens and iterations of a script."""

    micro_batch_size: int = flag("sequences in a microbatch", MISSING)
    seq_length: int | None = flag("tokens in a sequence")
    train_iters: int | None = flag("number of iterations")


@dataclass(frozen=True)
class ScriptArguments(_ScriptSizes):
    """The script arguments that determine the number of ranks, and the microbatches and tokens in an iteration."""

    world_size: int = 1
    vocabulary_parallel: bool = False

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.ranks_of_replica


def split_script(words: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """Split command-line words into (script, flags); the script is None for this project's `pretrain_gpt.py`.

    Raises:
        ValueError: the first word is neither a flag nor a file.
    """
    if not words or words[0].startswith("-"):
        return None, tuple(words)
    script = Path(words[0])
    if not script.is_file():
        raise ValueError(f"{script} is not a file: give flags after --, or a script and its flags")
    return (None if script.resolve() == _TRAINER else script), tuple(words[1:])


def read_script_arguments(words: Sequence[str]) -> ScriptArguments:
    """Read a script's flags into `ScriptArguments`, and skip every flag that has no field in `ScriptArguments`.

    Raises:
        ValueError: a flag makes a comparison of schedules impossible, or the value of a flag has the wrong type.
    """
    for name, reason in _REFUSED.items():
        if name in names_in(words):
            raise ValueError(f"argument {name}: not allowed after --: {reason}")
    return take_flags(ScriptArguments, (_ScriptSizes,), words)[0]


def checked_script_arguments(script: Path, words: Sequence[str], world_size: int) -> ScriptArguments:
    """Check a script's flags as `python -m megatron.zero_bubble` does; return its arguments for `world_size` ranks.

    Raises:
        ValueError: `python -m megatron.zero_bubble` would refuse the flags with the same message.
    """
    command = parse_command_line([str(script), *words])
    complete = complete_script_arguments(command.flags, command.script_arguments)
    check_script_arguments(command.flags, complete, {"WORLD_SIZE": str(world_size)})
    spreads_vocabulary = command.flags.vocabulary_parallel
    return replace(read_script_arguments(words), world_size=world_size, vocabulary_parallel=spreads_vocabulary)
