"""Runs a pipeline's ranks in one process and compares them bitwise with megatron-core's schedule on the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model

from megatron.zero_bubble.cli.check.models import Model
from megatron.zero_bubble.cli.check.turns import run_in_turns
from megatron.zero_bubble.cli.trainings import one_process, rank_model
from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement, Schedule, lower
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.forward_step import make_forward_step

NUM_MICROBATCHES = 8
CASES = (("zb-h1", 1), ("1f1b", 4), ("zb-h1", 4), ("zb-2p", 4), ("interleaved-zb", 2), ("zb-v", 2))
"""The schedules to check, each with its number of ranks."""


@dataclass(frozen=True)
class Outcome:
    """The results of one step: the loss function's tensors for each microbatch, and every parameter's gradient."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class NumericsCheck:
    schedule: str
    num_ranks: int
    differing: tuple[str, ...]
    """Names of the parameters whose gradients are not bitwise equal, and `loss` if the losses are not."""
    undetermined: tuple[str, ...]
    """Names that differ between two runs of megatron-core's own schedule, because some kernels add in any order."""

    @property
    def passed(self) -> bool:
        return not self.differing


def check_numerics(model: Model, device: torch.device) -> list[NumericsCheck]:
    """Compare one step in bf16 under every case with megatron-core's own schedule on the whole model."""
    args = model.arguments(model.pipeline_size)
    checks = []
    with one_process(args):
        whole = rank_model(args, Placement("linear", 1), 0, None)
        expected = _run_megatron_core(args, whole, device)
        undetermined = tuple(_numeric_differences(expected, _run_megatron_core(args, whole, device)))
        weights = dict(_named_parameters(args, Placement("linear", 1), 0, whole))
        for name, num_ranks in CASES:
            schedule = generate(name, num_ranks, NUM_MICROBATCHES)
            outcome = _run_schedule(args, lower(schedule), weights, device)
            differing = tuple(what for what in _numeric_differences(expected, outcome) if what not in undetermined)
            checks.append(NumericsCheck(name, num_ranks, differing, undetermined))
    return checks


def _numeric_differences(expected: Outcome, outcome: Outcome) -> Iterator[str]:
    assert expected.gradients.keys() == outcome.gradients.keys(), "the stages hold other parameters than the model"
    if not all(map(torch.equal, expected.losses, outcome.losses)):
        yield "loss"
    for name, gradient in expected.gradients.items():
        if not torch.equal(gradient, outcome.gradients[name]):
            yield name


def _run_megatron_core(args: Arguments, whole: Sequence[Any], device: torch.device) -> Outcome:
    whole[0].zero_grad_buffer()
    config = get_model_config(whole[0])
    config.finalize_model_grads_func = None
    losses = get_forward_backward_func()(
        forward_step_func=make_forward_step(args),
        data_iterator=iter(_batches(args, device)),
        model=list(whole),
        num_microbatches=NUM_MICROBATCHES,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    return Outcome(_loss_tensors(losses), _gradients(args, Placement("linear", 1), 0, whole))


def _run_schedule(
    args: Arguments, schedule: Schedule, weights: dict[str, torch.Tensor], device: torch.device
) -> Outcome:
    placement = schedule.placement

    def run(rank: int, communicator: Communicator) -> Outcome:
        store = WeightGradStore(placement.num_chunks)
        chunks = rank_model(args, placement, rank, store)
        with torch.no_grad():
            for name, parameter in _named_parameters(args, placement, rank, chunks):
                parameter.copy_(weights[name])
        stage = make_stage(args, placement, rank, chunks, device)
        Executor(schedule, rank, communicator, store).run(stage)
        stage.finish()
        return Outcome(_loss_tensors(stage.forward_data_store), _gradients(args, placement, rank, chunks))

    outcomes = run_in_turns(schedule.num_ranks, run)
    gradients = {name: gradient for outcome in outcomes for name, gradient in outcome.gradients.items()}
    return Outcome([loss for outcome in outcomes for loss in outcome.losses], gradients)


def make_stage(
    args: Arguments, placement: Placement, rank: int, chunks: list[Any], device: torch.device
) -> MegatronStage:
    """Build a rank's stage as training does, with batches that are the same on every rank."""
    batches = _batches(args, device)
    return MegatronStage(
        forward_step_func=make_forward_step(args),
        data_iterators=[iter(batches) for _ in chunks],
        model_chunks=chunks,
        placement=placement,
        rank=rank,
        num_microbatches=NUM_MICROBATCHES,
        output_shape=(args.seq_length, args.micro_batch_size, args.hidden_size),
        cp_group_size=1,
        device=device,
    )


def _batches(args: Arguments, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return the batches of one step, which are the same on every rank."""
    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(args.seed)
    assert args.vocab_size is not None

    def numbers() -> torch.Tensor:
        return torch.randint(args.vocab_size or 1, shape, generator=generator).to(device)

    positions = torch.arange(args.seq_length, device=device).expand(shape)
    mask = torch.ones(shape, device=device)
    return [
        {"tokens": numbers(), "labels": numbers(), "position_ids": positions, "loss_mask": mask}
        for _ in range(NUM_MICROBATCHES)
    ]


def _loss_tensors(reports: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [report["lm loss"] for report in reports]


def _gradients(args: Arguments, placement: Placement, rank: int, chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    named = _named_parameters(args, placement, rank, chunks)
    return {name: parameter.main_grad.clone() for name, parameter in named}


def _named_parameters(
    args: Arguments, placement: Placement, rank: int, chunks: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
    """Yield a rank's parameters by their names in the whole model, because a stage counts its layers from 0."""
    layers = args.num_layers // placement.num_stages
    for index, chunk in enumerate(chunks):
        first = layers * placement.stage_of(rank, index)
        for name, parameter in unwrap_model(chunk).named_parameters():
            before, number, after = re.split(r"(?<=layers\.)(\d+)", name) if "layers." in name else (name, "", "")
            yield before + (str(int(number) + first) if number else "") + after, parameter
