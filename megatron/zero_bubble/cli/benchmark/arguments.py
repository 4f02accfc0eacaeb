"""The flags of `zero-bubble benchmark`."""

from __future__ import annotations

import shlex
import shutil
import sys
from argparse import ArgumentTypeError
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from megatron.zero_bubble.cli.invocation import FollowingFlags, at_least, names_in, value_of
from megatron.zero_bubble.cli.shared_flags import SizeFlags, TableFlags
from megatron.zero_bubble.session.aliases import AliasFlags
from megatron.zero_bubble.session.flag_parser import flag
from megatron.zero_bubble.session.flags import CHUNK_FLAGS, flag_name
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.layers import layers_of_layout

DEFAULT_SCHEDULES = ("zb-h1", "zb-2p", "zb-v")
PROG = "zero-bubble benchmark"
TRAINER = ("-m", "megatron.zero_bubble.trainer")
"""Command-line words with which torchrun starts the installed pretrain_gpt.py."""
ALIASES = tuple(flag_name(field.name) for field in fields(AliasFlags))
GROUP_SIZE = "--microbatch-group-size-per-virtual-pipeline-stage"
CHUNKS_OR_GROUPS = (*map(flag_name, CHUNK_FLAGS), GROUP_SIZE)
LAYOUT, PATTERN = "--pipeline-model-parallel-layout", "--hybrid-layer-pattern"
_SET_HERE = ("--pipeline-model-parallel-size", "--global-batch-size", "--train-iters", "--log-interval")
_ENDS_AND_MEMORY = ("--exit-interval", "--log-memory-interval")
_NAMES_OF_SCHEDULES = (
    *("--zero-bubble", "--zero-bubble-schedule", "--enable-zero-bubble"),
    *("--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup"),
)


def parted(words: Sequence[str], names: Collection[str], prefix: str | None = None) -> tuple[list[str], list[str]]:
    """Split command-line words into two lists: the flags that are not selected, and the selected flags.

    Args:
        words: the command line; a flag and its value are two words, or one word such as `--name=value`.
        names: the flags to select, such as `--lr`.
        prefix: flags whose names begin with this text are selected as well.
    """
    others: list[str] = []
    named: list[str] = []
    into = others
    for word in words:
        if word.startswith("--"):
            is_named = word.split("=", 1)[0] in names or (prefix is not None and word.startswith(prefix))
            into = named if is_named else others
        into.append(word)
    return others, named


def _num_stages(name: str, value: str, num_ranks: int) -> int:
    """Return the number of pipeline stages in `value`, the layout or the layer pattern that the flag `name` gives."""
    return len(layers_of_layout(value, num_ranks) if name == LAYOUT else HybridPattern.parse(value).stages)


def _quoted_words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentTypeError(f"expected words as in a shell, got {text!r}: {error}") from None
    if not words:
        raise ArgumentTypeError(f"expected at least one word, got {text!r}")
    return words


def _schedule(text: str) -> str:
    _quoted_words(text)
    return text


def _count_flag(help: str, default: int, smallest: int = 1) -> Any:
    return flag(help, default, parse=at_least(smallest), metavar="N")


@dataclass(frozen=True)
class BenchmarkFlags(SizeFlags, TableFlags, FollowingFlags):
    """the training runs"""

    following: ClassVar[str] = "[SCRIPT] <the flags of a training run>"
    script: Path | None = None
    """The Megatron-LM script that the benchmark runs; None if the benchmark runs this project's pretrain_gpt.py."""
    schedule_flags: tuple[str, ...] = ()
    """Zero-bubble flags that all schedules of --schedule share; the flags of a single schedule follow these flags."""

    pipeline_size: int = flag(
        "pipeline ranks (default: the size in the flags after --, which may then be the flags of any training run)",
        parse=at_least(2),
        metavar="P",
    )
    num_microbatches: int = flag("microbatches of an iteration, with --pipeline-size", parse=at_least(1), metavar="M")
    schedule: list[str] | None = flag(
        "schedule to train under, or chosen: with --zero-bubble alone, which chooses layout and schedule; may be "
        "repeated; flags may follow in quotes: 'auto --zero-bubble-memory-limit 1.5' "
        f"(default: {', '.join(DEFAULT_SCHEDULES)}; without --pipeline-size --zero-bubble)",
        parse=_schedule,
        action="append",
        metavar="NAME",
    )
    rounds: int = _count_flag("number of training runs of every schedule", 5)
    warmup: int = _count_flag(
        "unmeasured iterations at the start of a run; `auto` plans after the sixth, may correct the plan after "
        "the fourteenth, and may compare its order with megatron-core's order until the thirtieth",
        30,
        7,
    )
    iterations: int = _count_flag("measured iterations of a training run", 20)
    interval: int = _count_flag("iterations whose mean time is one measurement", 5)
    timeout: int = _count_flag("largest duration of a training run in seconds", 600)
    baseline_flags: list[str] | None = flag(
        "flags only for the training under megatron-core's 1F1B, in quotes", parse=_quoted_words, metavar="FLAGS"
    )
    launch: list[str] | None = flag(
        "command that starts a program on all ranks (default: torchrun on this machine)",
        parse=_quoted_words,
        metavar="COMMAND",
    )
    world_size: int | None = flag(
        "number of ranks that --launch starts (default: --pipeline-size; without --pipeline-size, the ranks of as many "
        "replicas as this machine has GPUs for, at least one)",
        parse=at_least(2),
        metavar="N",
    )
    losses: bool = flag(
        "compare the losses, too: each layer's initial weights depend on its own seed, and not on the layout", False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup", "iterations"):
            if getattr(self, name) % self.interval:
                raise ValueError(f"argument --{name}: must be a multiple of --interval {self.interval}")
        if (self.pipeline_size is None) != (self.num_microbatches is None):
            missing, given = ("--num-microbatches", "--pipeline-size")[:: -1 if self.pipeline_size is None else 1]
            raise ValueError(f"argument {missing} is required with {given}")

        if self.num_chunks is not None and self.pipeline_size is None and self.schedule is None:
            raise ValueError("argument --num-chunks: needs --pipeline-size or --schedule")
        if self.launch is not None and shutil.which(self.launch[0]) is None:
            raise ValueError(f"argument --launch: {self.launch[0]} is not a command of this machine, such as srun")
        quotes = [("--schedule", shlex.split(text)) for text in self.schedule or ()]
        for name, words in (*quotes, ("--baseline-flags", self.baseline_flags or [])):
            for word in (*_SET_HERE, *_ENDS_AND_MEMORY):
                if word in names_in(words):
                    raise ValueError(
                        f"argument {name}: {word} not allowed in {shlex.join(words)!r}: the benchmark sets it"
                    )

    def of_named_schedules(self) -> BenchmarkFlags:
        """Return the benchmark's flags with all zero-bubble flags moved from `training_flags` to `schedule_flags`.

        Raises:
            ValueError: a flag after `--` sets the schedule or another value that the benchmark itself sets, such as the
                global batch size.
        """
        if self.training_flags and not self.training_flags[0].startswith("-"):
            raise ValueError("argument --pipeline-size: not allowed with a script after --, whose flags set the size")
        reasons = {
            **dict.fromkeys(_SET_HERE, "which sets it"),
            **dict.fromkeys(_NAMES_OF_SCHEDULES, "whose --schedule names the schedules"),
            **dict.fromkeys(CHUNKS_OR_GROUPS, "whose --num-chunks and --microbatch-group-size set it"),
        }
        for word, reason in reasons.items():
            if word in names_in(self.training_flags):
                raise ValueError(f"argument {word}: not allowed after -- with --pipeline-size, {reason}")
        for name in (LAYOUT, PATTERN):
            value = value_of(name, self.training_flags)
            if value is not None and _num_stages(name, value, self.pipeline_size) > self.pipeline_size:
                raise ValueError(
                    f"argument {name}: {value} is not allowed after --, because 1F1B has one stage a rank: give it to "
                    f"a schedule, as in --schedule 'zb-v {name} ...'"
                )
        shared, ours = parted(self.training_flags, ALIASES, prefix="--zero-bubble")
        return replace(self, training_flags=tuple(shared), schedule_flags=tuple(ours))

    @property
    def program(self) -> tuple[str, ...]:
        """Command-line words that name the training program, such as `-m` and the name of a module."""
        return TRAINER if self.script is None else ("-m", "megatron.zero_bubble", str(self.script))

    @property
    def num_ranks(self) -> int:
        return self.world_size or self.pipeline_size

    @property
    def launcher(self) -> list[str]:
        """Command-line words that start the training program on all ranks: the value of --launch, or torchrun."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return self.launch or [*torchrun, "--nproc-per-node", str(self.num_ranks)]
