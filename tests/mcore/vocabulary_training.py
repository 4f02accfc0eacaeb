"""Trains tiny GPTs whose vocabulary is in shards, or not, on real ranks, and keeps losses and gradients of every step.

All trainings of a job have the same initial weights and data, whatever their placement, and no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as mcore
from megatron.core.utils import unwrap_model
from vocabulary_emulation import EmulatedStep

from megatron.zero_bubble.cli.trainings import complete_arguments
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.mcore.vocabulary_model import vocabulary_shard_of
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedules import get_forward_backward_func
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint import Checkpointer, Progress, TrainingState
from megatron.zero_bubble.trainer.forward_step import make_forward_step
from megatron.zero_bubble.trainer.initialize import initialized
from megatron.zero_bubble.trainer.model import build_model, transformer_config
from megatron.zero_bubble.trainer.optimization import build_lr_scheduler, build_optimizer
from tests.launch import TINY_GPT
from tests.ranks import be_rank, run_on_ranks
from tests.trainings import process_group

MICROBATCHES, VOCABULARY = 4, 128
FLAGS = (
    *(*TINY_GPT, "--attention-dropout", "0", "--hidden-dropout", "0", "--global-batch-size", str(MICROBATCHES)),
    *("--micro-batch-size", "2", "--global-batch-size", str(2 * MICROBATCHES)),
)
EMBEDDING, OUTPUT = "embedding", "output"
Outcome = dict[str, Any]
"""`losses`: of every microbatch of every step; `evaluation`: of those of an evaluation after them; `gradients`: by
parameter, for every step; `norms`: of all gradients, of every step."""
EMULATED = "emulated"
"""The name of a training that is computed in one process, for one step."""


@dataclass(frozen=True)
class Training:
    """One training: its schedule, None for megatron-core's own, and the flags that differ from the job's."""

    schedule: str | None = "zb-h1"
    flags: tuple[str, ...] = ()
    is_sharded: bool = True
    num_steps: int = 2
    warms_up: bool = False
    loads: str | None = None
    """The training whose last state this one begins with."""


def run_job(num_ranks: int, trainings: dict[str, Training], flags: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """Run trainings in one job and return what each has computed, put together from all ranks."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(num_ranks, _run_rank, (trainings, tuple(flags), folder, store.port), timeout=240) == 0
    return {
        name: _merged([torch.load(folder / f"{name}.{rank}.pt") for rank in range(num_ranks)]) for name in trainings
    }


def _merged(outcomes: list[Outcome]) -> Outcome:
    """Put the ranks' outcomes together: the losses are on one of them, and gradients of shards follow each other."""
    steps = []
    for of_ranks in zip(*(outcome["gradients"] for outcome in outcomes), strict=True):
        step: dict[str, torch.Tensor] = {}
        for gradients in of_ranks:
            step |= gradients
        for name in (EMBEDDING, OUTPUT):
            parts = sorted(key for key in step if key.startswith(f"{name}/"))
            if parts:
                step[name] = torch.cat([step.pop(part) for part in parts])
        steps.append(step)
    losses = {what: next((one[what] for one in outcomes if one[what]), []) for what in ("losses", "evaluation")}
    return {**losses, "gradients": steps, "norms": outcomes[0]["norms"]}


def _run_rank(
    rank: int, num_ranks: int, trainings: dict[str, Training], flags: Sequence[str], folder: Path, port: int
) -> None:
    be_rank(rank, num_ranks)
    for number, (name, training) in enumerate(trainings.items()):
        store = dist.PrefixStore(str(number), dist.TCPStore("localhost", port))
        run = _emulate if name == EMULATED else _train
        loads = ("--load", str(folder / training.loads)) if training.loads else ()
        all_flags = [*FLAGS, *flags, *training.flags, "--save", str(folder / name), *loads]
        with process_group(rank, num_ranks, store):
            torch.save(run(training, all_flags, num_ranks), folder / f"{name}.{rank}.pt")


def plan_of(training: Training, num_ranks: int) -> RunSchedules:
    """The plan of a training, for megatron-core's own schedule that of its placement."""
    plan = RunSchedules.named(training.schedule or "1f1b", num_ranks)
    return plan.requesting(vocabulary_parallel=training.is_sharded)


def _train(training: Training, words: Sequence[str], num_ranks: int) -> Outcome:
    args = complete_arguments(list(words), num_ranks, "test", has_cuda=False)
    plan = plan_of(training, args.pipeline_model_parallel_size)
    with initialized(args, plan.placement):
        store = WeightGradStore(plan.placement.num_chunks) if training.schedule else None
        config = transformer_config(args, plan.placement.num_chunks, None)
        sharded = {"zero_bubble_vocabulary_parallel": "on" if training.is_sharded else "off"}
        flags = JobFlags.of(args, zero_bubble_seed_by_layer=True, **sharded)
        chunks: list[Any] = build_model(args, config, Session.to_build(flags, plan.placement, store))
        optimizer = build_optimizer(args, chunks, config)
        run: Any = mcore.get_forward_backward_func()
        if store is not None:
            run = get_forward_backward_func(plan.name, store, vocabulary_parallel=training.is_sharded)
            if training.warms_up:
                run = ForwardBackward(plan, store)
                run.warms_up = True
        progress = Progress(iteration=training.num_steps)
        state = TrainingState(progress, chunks, optimizer, build_lr_scheduler(args, optimizer))
        checkpointer = Checkpointer(args, state)
        if args.load:
            checkpointer.load()
        outcome: Outcome = {"losses": [], "evaluation": [], "gradients": [], "norms": []}
        for step in range(training.num_steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            outcome["losses"] += run_step(args, chunks, run, step)
            outcome["gradients"].append(gradients_of(chunks))
            outcome["norms"].append(optimizer.step()[1])
        with torch.no_grad():
            outcome["evaluation"] += run_step(args, chunks, run, 100, forward_only=True)
        if store is not None:
            with torch.inference_mode():
                assert run_step(args, chunks, run, 100, forward_only=True) == outcome["evaluation"]
        if args.save:
            checkpointer.save()
        if store is not None:
            run.close()
    return outcome


def _emulate(training: Training, flags: Sequence[str], num_ranks: int) -> Outcome:
    args = complete_arguments(list(flags), num_ranks, "test", has_cuda=False)
    with initialized(args, Placement("linear", num_ranks)):
        step = EmulatedStep(args)
        step.run(microbatches(args, 0))
    return {"losses": step.losses, "evaluation": [], "gradients": [step.gradients()], "norms": []}


def run_step(
    args: Arguments, chunks: list[Any], run: Callable[..., Any], step: int, *, forward_only: bool = False
) -> list[float]:
    """Run forward and backward of a step; return the loss of every microbatch on the rank that has them."""
    reports = run(
        forward_step_func=make_forward_step(args),
        data_iterator=[microbatches(args, step) for _ in chunks] if len(chunks) > 1 else microbatches(args, step),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    return [report["lm loss"][0].item() for report in reports]


def microbatches(args: Arguments, step: int) -> Iterator[dict[str, torch.Tensor]]:
    """The microbatches of a step, some of whose tokens do not count."""
    shape = args.micro_batch_size, args.seq_length
    for microbatch in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens, labels = (torch.randint(args.padded_vocab_size, shape, generator=generator) for _ in range(2))
        mask = (torch.rand(shape, generator=generator) < 0.8).float()
        positions = torch.arange(args.seq_length).expand(shape).contiguous()
        yield {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


def gradients_of(chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The gradients of this rank's parameters, by names that do not depend on their places.

    Those of embedding and output layer are parts of one tensor each, whose names are in the order of the parts.
    """
    shard = vocabulary_shard_of(chunks)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    found = {}
    for chunk in chunks:
        model: Any = unwrap_model(chunk)
        for name, parameter in model.named_parameters():
            match name.split("."):
                case ["vocabulary_shard", which, "weight"]:
                    assert shard is not None
                    name = f"{which}/{shard.index:02d}"
                case ["embedding", "word_embeddings", "weight"]:
                    name = f"{EMBEDDING}/{tensor_rank:02d}"
                case ["output_layer", "weight"]:
                    if model.share_embeddings_and_output_weights:
                        continue
                    name = f"{OUTPUT}/{tensor_rank:02d}"
                case ["decoder", "layers", number, *rest]:
                    number = model.decoder.layers[int(number)].layer_number
                    name = f"layer {number} {'.'.join(rest)} of {tensor_rank}"
                case _:
                    name = f"{name} of {tensor_rank}"
            found[name] = parameter.main_grad.clone()
    return found
