"""Prepares the benchmark of a training run that the user gives after `--`: flags, or a script with its flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.zero_bubble.cli.benchmark.arguments import (
    ALIASES,
    CHUNKS_OR_GROUPS,
    LAYOUT,
    PATTERN,
    PROG,
    BenchmarkFlags,
    parted,
)
from megatron.zero_bubble.cli.benchmark.contestants import Contestant, group_size_flags, megatrons_interleaved
from megatron.zero_bubble.cli.benchmark.script_arguments import ScriptArguments, read_script_arguments, split_script
from megatron.zero_bubble.cli.invocation import names_in, unless_given, value_of
from megatron.zero_bubble.launcher.command_line import ONLY_WITH_SCHEDULE
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.session.environment import check_sizes
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import chunks_of_flags
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments

CHUNKS = (2, 4)
"""Numbers of chunks per rank with which megatron-core's interleaved schedule runs, besides the user's own number."""
_SIZES = ("--pipeline-model-parallel-size", "--global-batch-size", "--log-interval", "--rampup-batch-size")
_OUTPUTS = (
    *("--save", "--save-interval", "--persistent-save-interval", "--non-persistent-save-interval"),
    *("--save-params-interval", "--load", "--pretrained-checkpoint", "--tensorboard-dir", "--wandb-project"),
    *("--save-wgrads-interval", "--save-dgrads-interval", "--save-activations-interval"),
    *("--save-tokens-per-expert-interval", "--logits-save-dir", "--record-memory-history"),
    *("--profile", "--log-memory-interval", "--log-numerics", "--zero-bubble-timeline", "--zero-bubble-timeline-iters"),
    *("--zero-bubble-profile-output", "--zero-bubble-unit-costs-output"),
)
_ENDS = ("--exit-interval", "--exit-duration-in-mins", "--eval-iters", "--full-validation")
_NEED_SCHEDULE = tuple(map(flag_name, ONLY_WITH_SCHEDULE))
"""Flags that a script of Megatron-LM accepts only with a zero-bubble schedule."""
_NAME_A_SCHEDULE = {"--zero-bubble", "--enable-zero-bubble", "--zero-bubble-schedule", "--zero-bubble-v-schedule"}
_CPU = "--zero-bubble-cpu"


def of_own_training(flags: BenchmarkFlags, num_devices: int) -> tuple[BenchmarkFlags, tuple[Contestant, ...]]:
    """Return the benchmark's flags for the user's training, and the schedules to compare with megatron-core's 1F1B.

    The training keeps its model, its data, its learning rates and its parallel sizes. The training loads no checkpoint,
    writes nothing, evaluates nothing, and stops after the last measured iteration. Training runs under megatron-core's
    schedules get no zero-bubble flags. The training under a zero-bubble schedule gets `--zero-bubble` if the user's
    flags name no schedule. A Megatron-LM script runs under `python -m megatron.zero_bubble` with every schedule,
    including megatron-core's schedules.

    Args:
        num_devices: number of GPUs of this machine, 0 without CUDA. Without --world-size, the training has as many
            data-parallel replicas as fit on the GPUs, but at least one.

    Raises:
        ValueError: the training would refuse its flags, the training has one pipeline rank, or the script is not a
            file.
    """
    script, words = split_script(flags.training_flags)
    args: Arguments | ScriptArguments
    if script is not None:
        args = _script_training(words, flags, num_devices)
    else:
        args = parse_arguments([*words, *unless_given(words, "--lr", "0")], PROG)
    check_sizes(args)
    pipeline_size = args.pipeline_model_parallel_size
    if pipeline_size < 2:
        raise ValueError(
            f"argument --pipeline-model-parallel-size: must be at least 2 after --, got {pipeline_size}: "
            "one pipeline rank has no schedule to choose"
        )
    num_iterations = flags.warmup + flags.iterations
    is_too_short = args.train_iters is not None and args.train_iters < num_iterations
    shared, _ = parted(words, (*_SIZES, *_OUTPUTS, *_ENDS, *["--train-iters"] * is_too_short))
    chunks = _own_chunks(args)
    shared, chunk_words = parted(shared, (*CHUNKS_OR_GROUPS, *[LAYOUT] * (chunks > 1)))
    shared, for_all = parted(shared, (_CPU,))
    shared, ours = parted(shared, (*ALIASES, *(_NEED_SCHEDULE if script is not None else ())), prefix="--zero-bubble")
    # The benchmark computes the TFLOP/s of this project's trainer, and reads a script's TFLOP/s from Megatron-LM's log.
    added = [] if script is None else unless_given(shared, "--log-throughput")
    num_ranks = flags.world_size or args.ranks_of_replica * max(1, num_devices // args.ranks_of_replica)
    resolved = replace(
        flags,
        pipeline_size=pipeline_size,
        num_microbatches=_num_microbatches(args, num_ranks),
        microbatch_group_size=flags.microbatch_group_size or args.microbatch_group_size_per_virtual_pipeline_stage,
        world_size=num_ranks,
        schedule=flags.schedule or [],
        script=script,
        training_flags=(*shared, *for_all, "--exit-interval", str(num_iterations), *added),
    )
    return resolved, tuple(_contestants(resolved, ours, chunk_words, chunks))


def _script_training(words: Sequence[str], flags: BenchmarkFlags, num_devices: int) -> ScriptArguments:
    if flags.losses:
        raise ValueError(
            "argument --losses: not allowed with a script after --, whose initial weights depend on the layout"
        )
    if not num_devices and flags.launch is None and _CPU not in names_in(words):
        raise ValueError(f"argument {_CPU}: required after --, because torch finds no CUDA device on this machine")
    return read_script_arguments(words)


def _own_chunks(args: Arguments | ScriptArguments) -> int:
    """Return the number of model chunks per rank that the flags of a training run ask for."""
    flags = JobFlags.of(args)
    pattern = flags.pattern
    if pattern is not None and len(pattern.stages) > flags.pipeline_model_parallel_size:
        raise ValueError(
            f"argument {PATTERN} {pattern}: not allowed after --, because 1F1B has one stage a rank: leave out its |"
        )
    num_layers = args.num_layers or len("" if pattern is None else pattern.symbols)
    if not num_layers and flags.pipeline_model_parallel_layout is None:  # a script may set its layers by itself
        return flags.num_virtual_stages_per_pipeline_rank or 1
    return chunks_of_flags(replace(flags, num_layers=num_layers)) or 1


def _contestants(
    flags: BenchmarkFlags, ours: Sequence[str], chunk_words: Sequence[str], chunks: int
) -> Iterator[Contestant]:
    """Yield the user's training under a zero-bubble schedule and under megatron-core's interleaved schedules.

    `ours` are the user's zero-bubble flags, and `chunk_words` the flags that ask for `chunks` model chunks per rank.
    """
    asks_for_schedule = not _NAME_A_SCHEDULE.isdisjoint(names_in(ours))
    words = tuple(ours) if asks_for_schedule else ("--zero-bubble", *ours)
    layout = value_of(LAYOUT, chunk_words)
    entry = ENTRIES.get(value_of("--zero-bubble-schedule", ours) or "")
    # Otherwise, the training chooses the number of chunks, or the schedule has a fixed number.
    keeps_chunks = layout is not None or "--zero-bubble-keep-layout" in ours or (entry and entry.takes_num_chunks)
    yield Contestant(" ".join(words), flags.program, (*words, *(chunk_words if keeps_chunks else ())), None, None)
    for number in sorted({*CHUNKS, *([chunks] if chunks > 1 and layout is None else [])}):
        yield megatrons_interleaved(flags, number, f"megatron-core interleaved, {number} chunks")
    if layout is not None:
        yield replace(
            megatrons_interleaved(flags, chunks, "megatron-core interleaved, your layout"),
            words=(LAYOUT, layout, *group_size_flags(flags)),
        )


def _num_microbatches(args: Arguments | ScriptArguments, num_ranks: int) -> int:
    """Return the number of microbatches of an iteration, rounded down; a training run refuses a fractional number."""
    replicas = max(1, num_ranks // args.ranks_of_replica)
    return max(1, (args.global_batch_size or 0) // (args.micro_batch_size * replicas))
