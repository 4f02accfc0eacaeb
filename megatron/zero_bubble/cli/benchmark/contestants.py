"""Chooses the schedules that `zero-bubble benchmark` compares, and builds the command of each schedule."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron.zero_bubble.cli.benchmark.arguments import DEFAULT_SCHEDULES, GROUP_SIZE, PROG, BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.script_arguments import ScriptArguments, checked_script_arguments
from megatron.zero_bubble.cli.invocation import names_in, unless_given, value_of
from megatron.zero_bubble.cli.trainings import complete_arguments
from megatron.zero_bubble.planner.registry import entry_of, placement_for
from megatron.zero_bubble.schedule import Placement, ScheduleError
from megatron.zero_bubble.session.flags import CHUNK_FLAGS, flag_name
from megatron.zero_bubble.trainer.arguments import Arguments

BASELINE = "megatron-core 1F1B"
CHOSEN = "chosen"
"""Value of --schedule for a training run with --zero-bubble alone, which chooses its layout at start-up."""
CHUNKS_FLAG = flag_name(CHUNK_FLAGS[0])


@dataclass(frozen=True)
class Contestant:
    """One schedule that the benchmark compares, with the program and the flags of its training."""

    name: str
    program: tuple[str, ...]
    words: tuple[str, ...]
    """Flags of this schedule, which follow the shared flags and override shared flags of the same name."""
    placement: Placement | None
    """Placement of the stages; None if the training chooses the placement."""
    schedule: str | None
    """Name under which this project simulates the schedule; None if the training chooses its schedule."""
    measures_costs: bool = False
    """Whether the training writes a profile, whose costs are valid for all schedules with the same placement."""
    is_required: bool = True
    """Whether a failure of this schedule ends the benchmark; otherwise the benchmark leaves the schedule out."""
    spreads_vocabulary: bool = False


@dataclass(frozen=True)
class Competition:
    """All schedules that the benchmark compares, and the flags that these schedules share."""

    contestants: tuple[Contestant, ...]
    flags: tuple[str, ...]
    args: Arguments | ScriptArguments = field(repr=False)
    """The complete arguments of the baseline training under megatron-core's 1F1B."""


def gather(flags: BenchmarkFlags, has_cuda: bool, peers: Sequence[Contestant] = ()) -> Competition:
    """Return the schedules to compare: the baseline, the schedules of --schedule, and the further schedules in `peers`.

    Raises:
        ValueError: a training run would refuse its flags, or a schedule is unknown.
    """
    shared = [*flags.training_flags, "--pipeline-model-parallel-size", str(flags.pipeline_size)]
    if "--train-samples" not in names_in(shared):
        shared += unless_given(shared, "--train-iters", str(flags.warmup + flags.iterations))
    shared += ["--log-interval", str(flags.interval)]
    shared += unless_given(shared, "--eval-iters", "0") + unless_given(shared, "--lr", "1e-4")
    if flags.losses:
        shared += unless_given(shared, "--zero-bubble-seed-by-layer")
    if has_cuda:
        shared += ["--log-memory-interval", str(flags.warmup + flags.iterations)]
    # The batch size depends on the number of replicas, which the other flags determine.
    args = _complete(shared, flags, has_cuda)
    batch = flags.num_microbatches * args.micro_batch_size * args.data_parallel_size
    shared += ["--global-batch-size", str(batch)]
    contestants = []
    for contestant in (*_chosen(flags), *peers):
        checked = [*shared, *contestant.words] if contestant.program == flags.program else shared
        try:
            finished = _complete(checked, flags, has_cuda)
        except ValueError as error:
            if contestant.is_required:
                raise ValueError(f"{contestant.name}: {error}") from error
            print(f"{contestant.name} left out: {error}", file=sys.stderr)
            continue
        if contestant.name == BASELINE:
            args = finished
        contestants.append(replace(contestant, spreads_vocabulary=finished.vocabulary_parallel))
    return Competition(tuple(contestants), tuple(shared), args)


def _complete(words: Sequence[str], flags: BenchmarkFlags, has_cuda: bool) -> Arguments | ScriptArguments:
    if flags.script is not None:
        return checked_script_arguments(flags.script, words, flags.num_ranks)
    return complete_arguments(words, flags.num_ranks, PROG, has_cuda=has_cuda)


def _chosen(flags: BenchmarkFlags) -> Iterator[Contestant]:
    baseline = tuple(flags.baseline_flags or ())
    yield Contestant(BASELINE, flags.program, baseline, Placement("linear", flags.pipeline_size), "1f1b")
    for text in dict.fromkeys(DEFAULT_SCHEDULES if flags.schedule is None else flags.schedule):
        yield _ours(text, flags)


def _ours(text: str, flags: BenchmarkFlags) -> Contestant:
    name, *more = shlex.split(text)
    chosen = ("--zero-bubble", *flags.schedule_flags, *more)
    ours = Contestant(" ".join([name, *more]), flags.program, chosen, None, None, is_required=bool(flags.schedule))
    if name == CHOSEN:
        return ours
    words = ["--zero-bubble-schedule", name, *flags.schedule_flags, *more]
    try:
        chunks = _chunks_in(more) or flags.num_chunks if entry_of(name).takes_num_chunks else None
        placement = placement_for(name, flags.pipeline_size, chunks)
        if placement.kind == "interleaved" and CHUNKS_FLAG not in names_in(more):
            words += [CHUNKS_FLAG, str(placement.num_chunks), *group_size_flags(flags)]
    except ScheduleError as error:
        raise ValueError(f"--schedule {text}: {error}") from error
    return replace(ours, words=tuple(words), placement=placement, schedule=name, measures_costs=True)


def megatrons_interleaved(flags: BenchmarkFlags, chunks: int, name: str) -> Contestant:
    """Return megatron-core's interleaved schedule with `chunks` chunks a rank; a failure does not end the benchmark."""
    words = (CHUNKS_FLAG, str(chunks), *group_size_flags(flags))
    placement = Placement("interleaved", flags.pipeline_size, chunks)
    return Contestant(name, flags.program, words, placement, "interleaved-1f1b", is_required=False)


def _chunks_in(words: Sequence[str]) -> int | None:
    """Return the number of model chunks per rank from a training run's flags; None if the flags give no number."""
    value = value_of(CHUNKS_FLAG, words) or ""
    return int(value) if value.isdigit() else None


def group_size_flags(flags: BenchmarkFlags) -> tuple[str, ...]:
    if flags.microbatch_group_size is None:
        return ()
    return (GROUP_SIZE, str(flags.microbatch_group_size))
