"""Measures the costs of the embedding, layers and output before the model is built, and chooses the job's layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.model_units import Unit, UnitModels, random_microbatch
from megatron.zero_bubble.mcore.transformer_engine import defer_weight_gradients
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.session.layout_choice import saved_choice
from megatron.zero_bubble.session.running import units_of
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint_files import checkpoint_folder, latest_iteration, loading, read_checked
from megatron.zero_bubble.trainer.forward_step import make_forward_step
from megatron.zero_bubble.trainer.initialize import seed_everything
from megatron.zero_bubble.trainer.model import build_unit, layer_kinds, unit_config
from megatron.zero_bubble.trainer.optimization import in_mixed_precision, wrap_in_ddp


def unit_models(args: Arguments) -> UnitModels:
    """Return the functions that build and run a model's units (embedding, layers, output) for measurements.

    Call `unit_models` in a `with initialized(...)` block, after the size of the vocabulary is known. Any placement on
    the job's pipeline ranks may be passed to `initialized`.
    """
    microbatch = random_microbatch(
        args.padded_vocab_size, args.micro_batch_size, args.seq_length, has_mask=args.reset_attention_mask
    )
    forward_step = make_forward_step(args)
    return units_of(args, unit_config(args, Unit()), partial(_build, args), forward_step, microbatch)


def _build(args: Arguments, unit: Unit, store: WeightGradStore) -> DistributedDataParallel:
    config = unit_config(args, unit)
    if args.transformer_impl == "transformer_engine":
        defer_weight_gradients(config)
    # Replicas of a unit neither gather parameters nor reduce gradients: only forward and backward are measured.
    sharing = ("use_distributed_optimizer", "use_torch_fsdp2", "overlap_grad_reduce", "overlap_param_gather")
    unshared: dict[str, Any] = {**dict.fromkeys(sharing, False), "num_distributed_optimizer_instances": 1}
    alone = replace(args, **unshared)
    model = build_unit(alone, config, unit)
    chunks = in_mixed_precision(alone, config, [model])
    split_weight_gradients(chunks, store)
    [wrapped] = wrap_in_ddp(alone, config, chunks, defers_weights=True)
    return wrapped


def settle_layout(args: Arguments, session: Session) -> Arguments:
    """Choose each setting of the layout that no flag gives, and apply the layout to `session`; a collective call.

    Call `settle_layout` in a `with initialized(...)` block, before the model is built. After the call, random states
    are the same as in a run that started with the chosen layout. A job that continues from a checkpoint keeps the
    layout of the checkpoint if the flags allow this layout, so that the job has the same losses as an uninterrupted
    job.

    Returns:
        The flags with the chosen layout.

    Raises:
        ValueError: no layout fits in the memory, or a flag does not work with the chosen layout.
    """
    if not session.job.is_layout_open:
        return args
    saved = None
    if args.load and not args.finetune:
        folder = checkpoint_folder(args.load, on_rank(0, lambda: latest_iteration(str(args.load))))
        with loading(folder):
            saved_args = on_rank(0, lambda: read_checked(folder, ("args",))[1]["args"])
        saved = saved_choice(saved_args, session.job.flags)
    if saved is not None:
        layout = session.restore_layout(saved, str(args.load))
    else:
        costs = session.unit_costs(unit_models(args), layer_kinds(args))
        layout = session.choose_layout(costs, args.padded_vocab_size)
    seed_everything(args.seed)
    return replace(args, **layout)
