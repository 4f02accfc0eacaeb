"""Parses the launcher's command line, and finds mistakes in the script's arguments before the script starts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.zero_bubble.launcher.script_settings import CHUNK_SOURCES, PATTERNS, divide_pattern, flags_of
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.session.aliases import AliasFlags, translated
from megatron.zero_bubble.session.environment import check_batch_size, check_num_ranks, check_sizes, number_in
from megatron.zero_bubble.session.flag_parser import flag, make_parser, parse_flags, take_flags
from megatron.zero_bubble.session.flags import (
    ParallelFlags,
    ReplicaFlags,
    ZeroBubbleFlags,
    check_zero_bubble_flags,
    flag_name,
)
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.layers import check_chunk_flags, chunks_of_flags, partition_of_flags
from megatron.zero_bubble.session.layout_choice import is_layout_open
from megatron.zero_bubble.session.plans import choose_placement, choose_plan
from megatron.zero_bubble.session.start_up import SessionError, users_mistakes

PROGRAM = "megatron.zero_bubble"
_USAGE = "python -m megatron.zero_bubble SCRIPT [the script's flags] [flags of zero bubble]"


@dataclass(frozen=True)
class LauncherOnlyFlags:
    """Launcher."""

    zero_bubble_cpu: bool = flag("run a script that needs CUDA on a machine without CUDA", False)
    allow_padding_num_layers: bool = flag("allow a number of layers that the stages do not divide", False)


@dataclass(frozen=True)
class LaunchFlags(ZeroBubbleFlags, ReplicaFlags, LauncherOnlyFlags, AliasFlags):
    """All flags that the launcher itself takes."""


_GROUPS = LaunchFlags.__bases__
ONLY_WITH_SCHEDULE = ("zero_bubble_seed_by_layer", "allow_padding_num_layers", *(e.name for e in fields(ReplicaFlags)))
"""Flags, other than those of `_check_owners`, that have no effect on a script without a zero-bubble schedule."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line of the launcher; `script` is None if the user asked only for help."""

    flags: LaunchFlags
    script: Path | None
    script_arguments: tuple[str, ...]
    wants_help: bool


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Split `argv` into the launcher's flags, the script and the script's arguments in their original order.

    Raises:
        SessionError: there is no script, or a launcher flag is unknown or wrong.
    """
    with users_mistakes():
        flags, rest = take_flags(LaunchFlags, _GROUPS, argv)
        flags = translated(flags)
        check_zero_bubble_flags(flags)
        for name in ONLY_WITH_SCHEDULE:
            if getattr(flags, name) and not flags.asks_for_schedule:
                raise ValueError(
                    f"{flag_name(name)} needs --zero-bubble or --zero-bubble-schedule (1f1b, for megatron-core's "
                    "order), without which the script runs untouched"
                )
    wants_help = any(argument in ("-h", "--help") for argument in rest)
    for argument in rest:
        name = argument.split("=")[0]
        if name.startswith("--zero-bubble"):
            raise SessionError(f"{name} is not a flag of megatron.zero_bubble; --help lists them")
    if not rest or rest[0].startswith("-"):
        if wants_help:
            return CommandLine(flags, None, (), True)
        given = f", but it is {rest[0]}" if rest else ""
        raise SessionError(f"the first argument must be the script{given}: {_USAGE}")
    script = Path(rest[0])
    if not script.is_file():
        raise SessionError(f"SCRIPT {script} is not a file")
    return CommandLine(flags, script, tuple(rest[1:]), wants_help)


def help_text() -> str:
    """Return the `--help` text of the launcher's flags."""
    return make_parser(_GROUPS, prog=f"python -m {PROGRAM}", usage=_USAGE, add_help=False).format_help()


def complete_script_arguments(flags: LaunchFlags, arguments: Sequence[str]) -> list[str]:
    """Return the script's arguments; if the schedule has several model chunks per rank, add a flag with their number.

    The flag for the number of model chunks is not added if the script's arguments give this number, a layout or a layer
    pattern.
    """
    given = {argument.split("=")[0] for argument in arguments}
    entry = ENTRIES.get(flags.zero_bubble_schedule or "")
    if entry is None or entry.num_chunks == 1 or given.intersection(map(flag_name, (*CHUNK_SOURCES, *PATTERNS))):
        return list(arguments)
    return [*arguments, flag_name(CHUNK_SOURCES[0]), str(entry.num_chunks)]


def flags_from_keywords(schedule: str | None, cpu: bool, settings: Mapping[str, Any]) -> LaunchFlags:
    """Return the flags that correspond to the keyword arguments of `enable`.

    Raises:
        SessionError: a keyword names no flag, or the flags contradict each other.
    """
    groups = (ZeroBubbleFlags, ReplicaFlags, AliasFlags)
    entries = {entry.name.removeprefix("zero_bubble_"): entry for group in groups for entry in fields(group)}
    unknown = sorted(set(settings) - set(entries))
    if unknown:
        raise SessionError(f"enable() has no setting {unknown[0]!r}: choose from {', '.join(sorted(entries))}")
    given = {**settings, "schedule": schedule}
    words = [word for name, value in given.items() for word in _words_of(entries[name], value)]
    with users_mistakes():
        flags = translated(replace(parse_flags(LaunchFlags, _GROUPS, words, "enable"), zero_bubble_cpu=cpu))
        flags = replace(flags, zero_bubble=flags.zero_bubble_schedule is None)
        check_zero_bubble_flags(flags)
    return flags


def _words_of(entry: Field[Any], value: Any) -> list[str]:
    """Return the command-line words that set the flag of the field `entry` to `value`."""
    name = flag_name(entry.name)
    if value is None or value is entry.default:
        return []
    if value is True:
        return [name]
    return [name, *map(str, value)] if isinstance(value, (list, tuple)) else [f"{name}={value}"]


_READ_ELSEWHERE = (
    *("--use-checkpoint-args", "--yaml-cfg"),
    *("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
)
"""Flags with which Megatron-LM reads the layers or the parallel sizes from a file or a checkpoint."""
_OTHER_BATCHES = ("--rampup-batch-size", "--decrease-batch-size-if-needed", "--step-batch-size-schedule")
"""Flags with which Megatron-LM may change the global batch size."""


@dataclass(frozen=True)
class ShapeFlags(ParallelFlags):
    """Megatron-LM's flags that set the number of ranks, stages, layers and microbatches."""

    num_layers: int | None = flag("number of transformer layers", None)
    hybrid_layer_pattern: str | None = flag(
        "layers of a hybrid model, one symbol each", None, names=("--hybrid-override-pattern",)
    )
    mtp_num_layers: int | None = flag("layers that predict further tokens", None)
    micro_batch_size: int | None = flag("sequences in a microbatch", None)
    global_batch_size: int | None = flag("sequences in an iteration", None)


def check_script_arguments(flags: LaunchFlags, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse script arguments whose numbers of ranks, stages, layers and microbatches contradict each other.

    Raises:
        SessionError: the script's numbers of ranks, stages, layers or microbatches contradict each other.
    """
    names = {argument.split("=")[0] for argument in arguments}
    if names.intersection(_READ_ELSEWHERE):
        return
    with users_mistakes():
        shape, _ = take_flags(ShapeFlags, (ShapeFlags,), arguments)
        world_size = number_in(environment, "WORLD_SIZE", 1)
        check_sizes(shape)
        check_num_ranks(shape, world_size)
        check_chunk_flags(shape)
        given = Namespace(**vars(shape))
        given.microbatch_group_size_per_vp_stage = shape.microbatch_group_size_per_virtual_pipeline_stage
        if given.hybrid_layer_pattern is not None:
            divide_pattern(given, flags)
            shape = replace(shape, num_layers=len(HybridPattern.parse(given.hybrid_layer_pattern).symbols))
        # A loop of its own may have some of these flags, and a script may give `pretrain` defaults for its flags.
        if shape.num_layers is None or shape.micro_batch_size is None:
            return
        # Parsing a layout imports megatron-core, which needs the CPU substitutions of `Launch` without CUDA.
        if shape.pipeline_model_parallel_layout:
            return
        replicas = world_size // shape.ranks_of_replica
        step = shape.micro_batch_size * replicas
        known = {
            "world_size": world_size,
            "data_parallel_size": replicas,
            "global_batch_size": step if shape.global_batch_size is None else shape.global_batch_size,
        }
        if not names.intersection(_OTHER_BATCHES):
            check_batch_size(known["global_batch_size"], shape.micro_batch_size, replicas)
        job = flags_of(given, flags, **known)
        if job.global_batch_size % step == 0:
            job = replace(job, model_chunks=chunks_of_flags(job))
            if is_layout_open(job):
                return
            partition_of_flags(job, choose_placement(job, choose_plan(job)))
