"""Runs the trainings of a plan one after the other in the same processes. `tests.launch` forks the ranks."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FAULT = "inf:"
"""`inf:ITERATION@RANK` among the flags: a gradient of this pipeline rank is infinite in this iteration."""
SPOIL = "spoil:"
"""`spoil:WHAT@RANK@CALL` among the flags: see `tests.spoiled`."""
RULES = "nccl:"
"""`nccl:SEED` among the flags: this training keeps NCCL's rules."""
WARM_UP = "warm-up"
"""`warm-up` among the flags: every stage computes once before the first step, as it does on a GPU."""

KILL = "kill:"
"""`kill:ITERATION@RANK` among the flags: this pipeline rank dies in that iteration, before the optimizer's step."""

COLLECTIVES = "collectives"
"""`collectives` among the flags: each rank writes the collectives that it starts to `NAME.RANK.calls`."""


def take(flags: list[str], prefix: str) -> list[str]:
    """Remove the words that begin with `prefix` and return the rest of each."""
    taken = [word.removeprefix(prefix) for word in flags if word.startswith(prefix)]
    flags[:] = [word for word in flags if not word.startswith(prefix)]
    return taken


@contextlib.contextmanager
def infinite_gradients(faults: set[tuple[int, ...]], deaths: set[tuple[int, ...]]) -> Iterator[None]:
    """Put the Inf in, or kill the process, right after the gradients have been reduced over replicas."""
    from megatron.core import parallel_state

    from megatron.zero_bubble import schedules

    finalize, iteration = schedules.finalize_gradients, 0

    def finalize_and_spoil(config: Any, placement: Any, chunks: list[Any], *more: Any) -> None:
        nonlocal iteration
        iteration += 1
        finalize(config, placement, chunks, *more)
        place = iteration, parallel_state.get_pipeline_model_parallel_rank()
        if place in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        if place in faults:
            for parameter in chunks[0].parameters():
                parameter.main_grad.view(-1)[0] = float("inf")

    schedules.finalize_gradients = finalize_and_spoil
    try:
        yield
    finally:
        schedules.finalize_gradients = finalize


@contextlib.contextmanager
def warmed_up() -> Iterator[None]:
    """Switch the warm-up of stages on, and print a line when it has run."""
    from megatron.zero_bubble import schedules
    from megatron.zero_bubble.job import running
    from megatron.zero_bubble.job.start_up import print_rank_0

    original, warm_up = running.ForwardBackward, schedules.warm_up

    def warm_up_and_tell(*args: Any) -> None:
        warm_up(*args)
        print_rank_0("warmed up")

    running.ForwardBackward = partial(original, warms_up=True)  # type: ignore[misc, assignment]
    schedules.warm_up = warm_up_and_tell
    try:
        yield
    finally:
        running.ForwardBackward, schedules.warm_up = original, warm_up  # type: ignore[misc]


def pretrain_or_tell(args: Any, job: Any) -> None:
    """Train; if the training ends by an error, print what each rank is told, and clear up for the next one."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    from megatron.zero_bubble.job.start_up import print_rank_0
    from megatron.zero_bubble.training.pretrain import pretrain
    from megatron.zero_bubble.training.progress import TrainingError

    try:
        pretrain(args, job)
    except TrainingError as error:
        told = [""] * args.world_size
        dist.all_gather_object(told, str(error))
        print_rank_0("\n".join(f"ended: {line}" for line in set(told)))
        parallel_state.destroy_model_parallel()
        unset_num_microbatches_calculator()


def run_rank(
    rank: int, num_ranks: int, plan: dict[str, list[str]], folder: Path, outputs: tuple[Path, Path], port: int
) -> None:
    """Be one rank of a job, which runs the trainings of `plan`.

    Args:
        plan: the flags of each training, by its name.
        folder: where a training's recorded collectives go.
        outputs: what the rank prints is appended to these files, stdout's first.
        port: of this machine, where the store is in which the ranks meet.
    """
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for number, (name, flags) in enumerate(plan.items()):
        # Each training in process groups of its own: those of all together would have a thousand threads.
        store = dist.PrefixStore(str(number), dist.TCPStore("localhost", port))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        run_training(folder, name, flags)
        gc.collect()  # the model holds some of the groups, and has cycles
        dist.destroy_process_group()


def run_training(folder: Path, name: str, flags: list[str]) -> None:
    from megatron.zero_bubble.job.start_up import print_rank_0
    from megatron.zero_bubble.training.arguments import parse_arguments
    from megatron.zero_bubble.training.checks import complete_and_check
    from megatron.zero_bubble.training.pretrain import pretrain
    from tests.collectives import recorded_collectives
    from tests.nccl_over_gloo import nccls_rules
    from tests.spoiled import spoiled
    from tests.undone import counted_undos

    faults, seeds, warms_up = take(flags, FAULT), take(flags, RULES), bool(take(flags, WARM_UP))
    is_recorded, spoils, kills = bool(take(flags, COLLECTIVES)), take(flags, SPOIL), take(flags, KILL)
    args, job = complete_and_check(parse_arguments(flags), os.environ, torch.cuda.is_available())
    print_rank_0(f"training {name}")
    rules = nccls_rules(int(seeds[0])) if seeds else contextlib.nullcontext()
    warm_up = warmed_up() if warms_up else contextlib.nullcontext()
    infinite, dying = ({tuple(map(int, place.split("@"))) for place in places} for places in (faults, kills))
    recorded = recorded_collectives() if is_recorded else contextlib.nullcontext([])
    with (
        rules,
        warm_up,
        recorded as calls,
        infinite_gradients(infinite, dying),
        spoiled(spoils),
        counted_undos() as undone,
    ):
        (pretrain_or_tell if spoils else pretrain)(args, job)
    if is_recorded:
        (folder / f"{name}.{args.rank}.calls").write_text(json.dumps(calls))
    counts = [0] * args.world_size
    dist.all_gather_object(counts, undone())
    print_rank_0(f"undone steps of each rank: {counts}")
