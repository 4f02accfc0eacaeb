"""Loops over megatron-core as others write them, on two pipeline ranks, without Megatron-LM's arguments.

Each trains a small model with dropout and returns its numbers: the losses, the norms and the parameters.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron.zero_bubble as zb
from megatron.zero_bubble.planner.microbatch_order import MicrobatchOrder
from megatron.zero_bubble.planner.step_plan import StepPlan, StepProblem
from tests.launcher.loop_parts import (
    VOCABULARY,
    Numbers,
    begin,
    chunk_of,
    configuration,
    digest_of,
    forward_step,
    freeze_norms,
    hybrid_chunk,
    in_ddp,
    losses_of,
    microbatches,
)
from tests.launcher.simple_loops import direct_loop, rewrapping_loop, searching_loop, simple_loop
from tests.ranks import be_rank
from tests.trainings import process_group


def bridge_loop(num_steps: int = 3, group_size: int | None = None) -> Numbers:
    """As Megatron-Bridge: two chunks a rank, hooks on the model before it is wrapped, and megatron-core's optimizer.

    Args:
        group_size: number of microbatches in a group; with it, the loop evaluates twice as many before it trains.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    begin(2)
    options = {"virtual_pipeline_model_parallel_size": 2, "bf16": True, "params_dtype": torch.bfloat16}
    options |= {"microbatch_group_size_per_vp_stage": group_size}
    config = configuration(**options)
    config.pipeline_dtype = torch.bfloat16
    # The chunks of another model are built in turn with the chunks of this model.
    both = [(chunk_of(config, chunk), chunk_of(configuration(**options), chunk)) for chunk in range(2)]
    chunks = [chunk for chunk, _ in both]
    for hook in (freeze_norms,):
        chunks = hook(chunks)
    model = in_ddp(config, [Float16Module(config, chunk) for chunk in chunks], overlap_grad_reduce=True)
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=False
    )
    optimizer = get_megatron_optimizer(optimizer_config, model)
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = [chunk.no_sync for chunk in model]
    config.finalize_model_grads_func = partial(finalize_model_grads)
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()

    def run(step: int, count: int, *, forward_only: bool = False) -> Numbers:
        reports = get_forward_backward_func(pp_size=pipeline, vp_size=2)(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches(step, count)) for _ in model],
            model=model,
            num_microbatches=count,
            seq_length=12,
            micro_batch_size=2,
            decoder_seq_length=12,
            forward_only=forward_only,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=None,
            pg_collection=None,
            force_all_reduce=False,
        )
        return losses_of(reports)

    numbers = [] if group_size is None else run(-1, 8, forward_only=True)
    for step in range(num_steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        numbers += run(step, 4)
        _, norm, _ = optimizer.step()
        numbers.append(float(norm).hex())
    return [*numbers, digest_of(model)]


def verl_loop(steps: range = range(3)) -> Numbers:
    """As verl: an actor is trained on microbatches of varied lengths and number, a reference model only evaluated.

    Args:
        steps: of which others than the first go on from the state that an earlier loop has saved.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    begin(1)
    options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # random states are not saved
    config = configuration(**options)
    actor = in_ddp(config, [chunk_of(config, None)])
    reference = [chunk_of(configuration(**options), None)]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), actor)
    config.finalize_model_grads_func = finalize_model_grads
    numbers, file = [], Path(f"verl.{dist.get_rank()}.pt")
    if steps.start:
        saved = torch.load(file, weights_only=False)
        actor[0].load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in steps:
        batches = microbatches(step, 3 + step, varied=True)
        for model, forward_only in ((reference, True), (actor, True), (actor, False)):
            optimizer.zero_grad()
            for chunk in actor:
                chunk.zero_grad_buffer()
            numbers += losses_of(run_varied(batches, model, forward_only=forward_only))
        _, norm, _ = optimizer.step()
        numbers.append(float(norm).hex())
    torch.save({"model": actor[0].state_dict(), "optimizer": optimizer.state_dict()}, file)
    return [*numbers, digest_of(actor)]


def run_varied(batches, model, *, forward_only):
    """Run microbatches of varied lengths as verl does, with a sequence length of 1; return megatron-core's reports."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


MEASURED = 2
"""Steps of `lengths_loop` after which the order of its microbatches is planned."""


def rotated(count: int) -> tuple[int, ...]:
    """Place in a step -> number of the microbatch in the data."""
    return (*range(2, count), 0, 1)


def lengths_loop(*, rotates: bool = False) -> Numbers:
    """Microbatches of varied lengths, for whose order another one is given in place of a plan.

    Args:
        rotates: whether the data already comes in that order.
    """
    count = 5

    def given(problem: StepProblem) -> StepPlan:
        return StepPlan(0, problem.rules.plan.schedule(count), MicrobatchOrder(rotated(count), 1.0, 2.0))

    def steps() -> Iterator[tuple[list[torch.Tensor], tuple[int, ...]]]:
        for step in range(5):
            batches, order = microbatches(step, count, varied=True), tuple(range(count))
            if rotates and step >= MEASURED:
                order = rotated(count)
            yield [batches[number] for number in order], order

    with mock.patch.object(StepProblem, "solve", given):
        return train_steps(steps())


def long_loop() -> Numbers:
    """Once costs are measured, microbatches are longer, so that not as many fit into memory at once."""
    from megatron.zero_bubble.runtime.step_planner import StepPlanner

    levels = []
    decide = StepPlanner.decide

    def decided(*arguments: Any, **options: Any) -> Any:
        decision = decide(*arguments, **options)
        levels.append(decision.level)
        return decision

    def steps() -> Iterator[tuple[list[torch.Tensor], tuple[int, ...]]]:
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            lengths = [4, 5, 4, 6] if step < MEASURED else [16, 8, 16, 15]
            yield [torch.randint(VOCABULARY, (1, length + 1), generator=generator) for length in lengths], (0, 1, 2, 3)

    with mock.patch.object(StepPlanner, "decide", decided):
        numbers = train_steps(steps())
    assert not levels or (max(levels[:MEASURED]) == 0 and min(levels[MEASURED:]) > 0), levels
    return numbers


def train_steps(steps: Iterator[tuple[list[torch.Tensor], tuple[int, ...]]]) -> Numbers:
    """Train on steps, each with its microbatches and their numbers, in whose order the losses are noted."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    begin(1)
    config = configuration(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    model = in_ddp(config, [chunk_of(config, None)])
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), model)
    config.finalize_model_grads_func = finalize_model_grads
    numbers = []
    for batches, order in steps:
        optimizer.zero_grad()
        model[0].zero_grad_buffer()
        reports = run_varied(batches, model, forward_only=False)
        if reports:
            reports = [reports[order.index(number)] for number in range(len(order))]
        numbers += losses_of(reports)
        _, norm, _ = optimizer.step()
        numbers.append(float(norm).hex())
    return [*numbers, digest_of(model)]


def hybrid_loop() -> Numbers:
    """As the simple loop, with a hybrid model: attention and MLPs are layers of their own."""
    return simple_loop(make=hybrid_chunk)


LOOPS: dict[str, Callable[[], Numbers]] = {
    "simple": simple_loop,
    "bridge": bridge_loop,
    "bridge, groups": partial(bridge_loop, group_size=4),
    "verl": verl_loop,
    "verl, stopped": partial(verl_loop, range(2)),
    "verl, resumed": partial(verl_loop, range(2, 3)),
    "hybrid": hybrid_loop,
    "rewrapping": rewrapping_loop,
    "searching": searching_loop,
    "direct": direct_loop,
    "lengths": lengths_loop,
    "lengths, rotated": partial(lengths_loop, rotates=True),
    "long": long_loop,
}


def run_rank(
    rank: int, num_ranks: int, loop: str, settings: dict[str, Any] | None, folder: Path, name: str, port: int
) -> None:
    """Be one rank of a loop, and write its numbers to `NAME.RANK.json` and its output to `NAME.RANK.txt`.

    Args:
        settings: keywords of `enable`; None for a loop under megatron-core's own schedule.
    """
    be_rank(rank, num_ranks)
    os.chdir(folder)
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)), contextlib.ExitStack() as resources:
        from megatron.core import parallel_state

        output = resources.enter_context((folder / f"{name}.{rank}.txt").open("w"))
        resources.enter_context(contextlib.redirect_stdout(output))
        if settings is not None:
            zb.enable(**settings, cpu=True)
        try:
            numbers = LOOPS[loop]()
        except ValueError as error:
            numbers = [str(error)]
        zb.disable()
        (folder / f"{name}.{rank}.json").write_text(json.dumps(numbers))
        parallel_state.destroy_model_parallel()
