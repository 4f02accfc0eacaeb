"""Who takes part in `--mode train`: what is started for each, and what is known of it before it runs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training_cli.flags import complete_arguments

from benchmark_cli.peers import ONE_CHUNK, peer_placements
from benchmark_cli.train_arguments import DEFAULT_SCHEDULES, PROG
from megatron.zero_bubble.schedule import Placement, ScheduleError
from megatron.zero_bubble.schedule.generators import placement_for
from megatron.zero_bubble.training.arguments import Arguments

ROOT = Path(__file__).parents[2]
BASELINE = "megatron-core 1F1B"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_SAME_ORDER = {**ONE_CHUNK, "Interleaved1F1B": "interleaved-1f1b"}
"""Schedules of torch.distributed.pipelining whose orders are those of ours, so that they can be simulated."""


@dataclass(frozen=True)
class Contestant:
    """One schedule, and how it is run."""

    name: str
    script: Path
    words: tuple[str, ...]
    """Its arguments before those that all share."""
    placement: Placement
    schedule: str | None
    """The name of ours with the same order; None if there is none."""
    is_ours: bool = False
    is_required: bool = True
    """Asked for by name: it has to run."""


@dataclass(frozen=True)
class Field:
    """Everybody, and the flags that all share."""

    contestants: tuple[Contestant, ...]
    flags: tuple[str, ...]
    args: Arguments = field(repr=False)
    """What megatron-core's 1F1B makes of the flags."""


def gather(arguments: argparse.Namespace, has_cuda: bool) -> Field:
    """The baseline, what --schedule names, and the peers.

    Raises:
        ValueError: a training would refuse its flags, or a schedule is unknown.
    """
    flags = [*arguments.training_flags, "--pipeline-model-parallel-size", str(arguments.pipeline_size)]
    flags += ["--train-iters", str(arguments.warmup + arguments.iterations), "--log-interval", str(arguments.interval)]
    flags += _unless_given(flags, "--eval-iters", "0") + _unless_given(flags, "--lr", "1e-4")
    if has_cuda:
        flags += ["--log-memory-interval", str(arguments.warmup + arguments.iterations)]
    # Once without a batch size, to know how many replicas there are.
    args = complete_arguments(flags, arguments.world_size, PROG, has_cuda=has_cuda)
    batch = arguments.num_microbatches * args.micro_batch_size * args.data_parallel_size
    flags += ["--global-batch-size", str(batch)]
    chosen = list(_chosen(arguments))
    for one in chosen:
        checked = [*one.words, *flags] if one.script.name == "pretrain_gpt.py" else flags
        try:
            finished = complete_arguments(checked, arguments.world_size, PROG, has_cuda=has_cuda)
        except ValueError as error:
            if one.is_required:
                raise ValueError(f"{one.name}: {error}") from error
            continue
        if one.name == BASELINE:
            args = finished
    return Field(tuple(chosen), tuple(flags), args)


def _unless_given(flags: Sequence[str], name: str, value: str) -> list[str]:
    return [] if name in flags else [name, value]


def _chosen(arguments: argparse.Namespace) -> Iterator[Contestant]:
    p, chunks = arguments.pipeline_size, arguments.num_chunks or 2
    pretrain = ROOT / "pretrain_gpt.py"
    interleaved = Placement("interleaved", p, chunks)
    yield Contestant(BASELINE, pretrain, (), Placement("linear", p), "1f1b")
    if arguments.peers:
        words = (_CHUNKS, str(chunks), *_group_size(arguments))
        yield Contestant(
            "megatron-core interleaved", pretrain, words, interleaved, "interleaved-1f1b", is_required=False
        )
    for text in dict.fromkeys(arguments.schedule or DEFAULT_SCHEDULES):
        yield _ours(text, arguments)
    if arguments.peers:
        script = ROOT / "tools" / "pretrain_gpt_torch.py"
        for name, placement in peer_placements(p, chunks).items():
            more = (_CHUNKS, str(placement.num_chunks)) if placement.num_chunks > 1 else ()
            yield Contestant(
                f"torch {name}", script, (name, *more), placement, _SAME_ORDER.get(name), is_required=False
            )


def _ours(text: str, arguments: argparse.Namespace) -> Contestant:
    name, *more = shlex.split(text) or [""]
    words = ["--zero-bubble-schedule", name, *more]
    try:
        placement = placement_for(name, arguments.pipeline_size)
        if placement.kind == "interleaved":
            placement = placement_for(name, arguments.pipeline_size, arguments.num_chunks)
            if _CHUNKS not in more:
                words += [_CHUNKS, str(placement.num_chunks), *_group_size(arguments)]
    except ScheduleError as error:
        raise ValueError(f"--schedule {text}: {error}") from error
    required = bool(arguments.schedule)
    return Contestant(" ".join([name, *more]), ROOT / "pretrain_gpt.py", tuple(words), placement, name, True, required)


def _group_size(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.microbatch_group_size is None:
        return ()
    return ("--microbatch-group-size-per-virtual-pipeline-stage", str(arguments.microbatch_group_size))
