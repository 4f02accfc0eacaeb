"""Runs F, B and W of every stage once before the first step, because the first use of a kernel could make a step hang.

On a GPU, the first launch of a kernel, the allocator's growth and the creation of a communicator may wait until the
device has finished all work. In a step, the device's work includes receives that are posted in advance; such a receive
ends only when its message arrives. If the sender of an awaited message in turn waits for this rank, the pipeline hangs.
Before the first step, no receives are posted, so that nothing can hang. The warm-up restores all state that it changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.multi_token import forget_losses
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.mcore.restart import Restart, make_rewindable
from megatron.zero_bubble.mcore.step_call import StepCall
from megatron.zero_bubble.mcore.vocabulary_model import vocabulary_shard_of
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind

_LARGEST = "current_max_attn_logits"
"""Attribute in which an attention module records the largest logits of a step."""


def warm_up(stage: MegatronStage, store: WeightGradStore, *, computes: bool = True) -> None:
    """Compute one microbatch on each stage of this rank, and discard all results; a collective call of all ranks.

    The warm-up runs at the start of the first training step. The warm-up does not change `.grad` of parameters, and
    clears the sums of gradients of DDP and FSDP2. The first step reads the data of the warm-up again. With fp8, the
    warm-up only creates communicators, because every forward changes the state of fp8 scaling. With varying message
    shapes, the warm-up only creates communicators, because a stage learns the shapes from the previous stage. The same
    holds without `computes`, and if a rank's data source has no `__next__`, so that its data could not be read again.
    """
    _make_communicators(stage.call, stage.device)
    chunks: list[Any] = stage.call.chunks
    if not computes or stage.call.config.fp8 or stage.shapes_vary or not _can_rewind_everywhere(stage):
        return
    with _rehearsal(stage, store) as rehearsal:
        shard = vocabulary_shard_of(chunks)
        if shard is not None:
            if stage.rank != stage.placement.rank_of(0):
                rehearsal.exchange(Op(OpKind.TOKENS, 0))
            rehearsal.run_on_shard(Op(OpKind.E, 0))
        # Megatron-LM's checks would count the warm-up's loss as the first loss of the step.
        with replaced(RerunStateMachine, "validate_result", lambda *_, **__: None):
            for chunk in range(len(chunks)):
                _compute_microbatch(rehearsal, store, chunk)
            if shard is not None:
                _compute_output(rehearsal)
                shard.forget_gradients()


def _can_rewind_everywhere(stage: MegatronStage) -> bool:
    """Return whether all data sources of the model can be read again; a collective call of the model's ranks."""
    can_rewind = all(source is None or hasattr(source, "__next__") for source in stage.data_iterators)
    for group in (stage.call.groups.tp, stage.call.groups.pp):  # only some ranks have a data source
        can_rewind = all(from_all_ranks(can_rewind, group))
    return can_rewind


@contextmanager
def _rehearsal(stage: MegatronStage, store: WeightGradStore) -> Iterator[MegatronStage]:
    """Make the stage that computes the warm-up; after the `with` block, even a failed one, restore the state."""
    chunks: list[Any] = stage.call.chunks
    restart = Restart(chunks)
    stage.data_iterators, rewindable = make_rewindable(stage.data_iterators)
    # The warm-up computes the first of two microbatches, because DDP reduces gradients with the last.
    rehearsal = replace(
        stage,
        call=replace(stage.call, num_microbatches=2),
        forward_data_store=[],
        finalizes=False,
        post_validation=None,
        vocabulary=None if stage.vocabulary is None else stage.vocabulary.rehearsal(2),
    )
    # Gradients are removed, because without DDP W would add to these gradients.
    gradients = [(parameter, parameter.grad) for chunk in chunks for parameter in chunk.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    modules = (module for chunk in chunks for module in chunk.modules())
    largest_logits = [(module, getattr(module, _LARGEST)) for module in modules if hasattr(module, _LARGEST)]
    try:
        yield rehearsal
    finally:
        for attention, largest in largest_logits:
            setattr(attention, _LARGEST, largest)
        store.clear()
        rehearsal.leave()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module in chunks:
            if hasattr(module, "zero_grad_buffer"):
                module.zero_grad_buffer()
        restart.apply()
        for iterator in rewindable:
            iterator.rewind()
        forget_losses()
        clear_aux_losses_tracker()


def _make_communicators(call: StepCall, device: torch.device) -> None:
    """Create the communicator of every process group that a step may use, by one all-reduce in each group."""
    groups, config, getters = call.groups, call.config, []
    if getattr(config, "num_moe_experts", None):
        getters += [
            parallel_state.get_expert_model_parallel_group,
            parallel_state.get_expert_data_parallel_group,
            parallel_state.get_expert_tensor_parallel_group,
            parallel_state.get_expert_tensor_and_model_parallel_group,
            parallel_state.get_tensor_and_context_parallel_group,
        ]
    balances_globally = "global_aux_loss" in str(getattr(config, "moe_router_load_balancing_type", None))
    if config.fp8 or balances_globally or getattr(config, "moe_router_enable_expert_bias", False):
        getters.append(partial(parallel_state.get_tensor_and_data_parallel_group, with_context_parallel=True))
    further = [getter(check_initialized=False) for getter in getters]
    for group in (groups.tp, groups.cp, groups.dp_cp, groups.pp, *further):
        if group is not None and group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def _compute_microbatch(stage: MegatronStage, store: WeightGradStore, chunk: int) -> None:
    """Run F, B and W of one chunk, with random tensors in place of messages from neighbouring stages."""
    place = stage.placement.stage_of(stage.rank, chunk)
    spec = stage.usual_message
    input_tensor, output_grad = None, None
    if place > 0:
        input_tensor = torch.randn(spec.shape, dtype=spec.dtype, device=spec.device).requires_grad_()
    output = stage.forward(0, chunk, input_tensor)
    is_last = place + 1 == stage.placement.num_stages
    if not is_last or stage.vocabulary is not None:
        output_grad = torch.randn(spec.shape, dtype=spec.dtype, device=spec.device)
    if not is_last:
        stage.release_output(output)
    stage.before_gradients(Op(OpKind.B, 0, chunk))
    with store.deferring():
        stage.backward(0, chunk, input_tensor, output, output_grad)
    store.flush(chunk, 0)
    stage.before_gradients(Op(OpKind.W, 0, chunk))
    store.pop(chunk, 0)


def _compute_output(stage: MegatronStage) -> None:
    """Run softmax S, loss L (only on the last stage's rank), and weight gradients T and EW of this rank's shard."""
    is_last = stage.rank == stage.placement.rank_of(stage.placement.num_stages - 1)
    stage.exchange(Op(OpKind.HIDDEN, 0))
    stage.run_on_shard(Op(OpKind.S, 0))
    stage.exchange(Op(OpKind.SOFTMAX, 0))
    if is_last:
        stage.run_on_shard(Op(OpKind.L, 0))
    stage.exchange(Op(OpKind.LOSS_GRAD, 0))
    stage.exchange(Op(OpKind.EMBEDDED_GRAD, 0))
    for kind in (OpKind.T, OpKind.EW):
        stage.before_gradients(Op(kind, 0))
        stage.run_on_shard(Op(kind, 0))
