"""Builds everything that `pretrain_gpt.py` needs, in order, and trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as mcore
from megatron.core.timers import Timers
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.job.description import describe, describe_places
from megatron.zero_bubble.job.optimizer_step import build_post_validation
from megatron.zero_bubble.job.plans import choose_placement, choose_plan, limit_flag
from megatron.zero_bubble.job.running import open_timeline, run_plan
from megatron.zero_bubble.job.stalls import open_watchdog
from megatron.zero_bubble.mcore.finite import FiniteCheck
from megatron.zero_bubble.mcore.placement import check_layers_built
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Infeasible, Placement
from megatron.zero_bubble.schedule.plan import Plan
from megatron.zero_bubble.schedules import ForwardBackward
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.checkpoint import Checkpointer
from megatron.zero_bubble.training.checkpoint_files import latest_iteration
from megatron.zero_bubble.training.data import DataConfig, build_data_iterator, build_datasets, reads_data
from megatron.zero_bubble.training.errors import TrainingError
from megatron.zero_bubble.training.forward_step import DataIterator
from megatron.zero_bubble.training.initialize import initialized, print_rank_0
from megatron.zero_bubble.training.logging import TrainingLog, open_writers
from megatron.zero_bubble.training.loop import Trainer
from megatron.zero_bubble.training.model import build_lr_scheduler, build_model, build_optimizer, transformer_config
from megatron.zero_bubble.training.save_lock import lock_folder
from megatron.zero_bubble.training.size_checks import check_memory
from megatron.zero_bubble.training.tokenizer import build_tokenizer, padded_vocab_size


def pretrain(args: Arguments) -> None:
    """Train a GPT as the (complete and checked) flags say.

    Raises:
        ValueError: the data, the tokenizer or the checkpoint does not fit, or a checkpoint cannot be written.
    """
    data_config = make_data_config(args)
    tokenizer = load_tokenizer(args)
    check_memory(args)
    data_config.validate(tokenizer.vocab_size)
    plan = choose_plan(args)
    placement = choose_placement(args, plan)
    if args.load:
        latest_iteration(args.load)
    with initialized(args, placement), ExitStack() as resources:
        if args.save:
            on_rank(0, lambda: _hold_folder(str(args.save), resources))
        trainer = _build_trainer(args, plan, placement, data_config, tokenizer, resources)
        try:
            trainer.train()
        except Infeasible as error:
            raise ValueError(f"{limit_flag(args)}: {error}") from error
        except TrainingError:
            raise
        except ValueError as error:
            raise RuntimeError("this is no mistake of the command line") from error
        trainer.close()


def _hold_folder(save: str, resources: ExitStack) -> None:
    """Keep other jobs from saving to this folder until `resources` are closed."""
    resources.enter_context(lock_folder(save, os.environ, print_rank_0))


def load_tokenizer(args: Arguments) -> MegatronTokenizerBase:
    """The tokenizer that the flags name; sets `args.padded_vocab_size`. Raises `ValueError` if it cannot be read."""
    tokenizer = build_tokenizer(
        args.tokenizer_type, args.tokenizer_model, args.vocab_size, args.vocab_file, args.merge_file
    )
    args.padded_vocab_size = padded_vocab_size(
        tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    return tokenizer


def _build_trainer(
    args: Arguments,
    plan: Plan | None,
    placement: Placement,
    data_config: DataConfig,
    tokenizer: MegatronTokenizerBase,
    resources: ExitStack,
) -> Trainer:
    timers = Timers(args.timing_log_level, "minmax") if args.timing_log_level else None
    config = transformer_config(args, placement.num_chunks, timers)
    store = WeightGradStore(placement.num_chunks) if plan else None
    model = build_model(args, config, placement, store)
    check_layers_built(args.num_layers, placement, model)
    optimizer = build_optimizer(args, model, config)
    scheduler = build_lr_scheduler(args, optimizer)
    checkpointer = Checkpointer(args, model, optimizer, scheduler)
    if args.load:
        checkpointer.load()
    describe(args, plan, model)
    describe_places(args, placement)
    post_validation = build_post_validation(args, plan, optimizer, model)
    forward_backward = choose_forward_backward(args, plan, store, post_validation)
    train_data, valid_data = open_data(args, data_config, tokenizer, model, resources)
    return Trainer(
        args,
        model,
        optimizer,
        scheduler,
        forward_backward,
        data_config,
        train_data,
        valid_data,
        checkpointer,
        TrainingLog(args, open_writers(args)),
        open_timeline(args, forward_backward) if isinstance(forward_backward, ForwardBackward) else None,
        open_watchdog(args, forward_backward),
        post_validation,
        FiniteCheck(model, placement, TrainingError, lambda: args.iteration) if args.checks_finite else None,
    )


def open_data(
    args: Arguments,
    data_config: DataConfig,
    tokenizer: MegatronTokenizerBase,
    model: list[torch.nn.Module],
    resources: ExitStack,
) -> tuple[list[DataIterator], list[DataIterator]]:
    """Training and validation data, one iterator for each model chunk that reads; `resources` closes them.

    Raises:
        ValueError: the data cannot be read, or what a checkpoint's run has left of it is too little.
    """
    reads = [
        reads_data(
            data_config,
            embeds=get_attr_wrapped_model(chunk, "pre_process"),
            is_last=get_attr_wrapped_model(chunk, "post_process"),
        )
        for chunk in model
    ]
    datasets = build_datasets(data_config, tokenizer, any(reads), print_rank_0)
    used = (args.consumed_train_samples, args.consumed_valid_samples)
    data_config.check_rest(datasets.num_samples, args.iteration, used)
    if args.eval_iters > 0 and datasets.num_samples[1] == 0:
        print_rank_0(" > no validation data: --eval-interval and --eval-iters have no effect")
        args.eval_iters = 0
    place = (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())

    def open_split(split: Any, consumed_samples: int) -> list[DataIterator]:
        iterators: list[DataIterator] = []
        for read in reads:
            iterator = build_data_iterator(split, data_config, consumed_samples, *place) if read else None
            if iterator is not None:
                resources.callback(iterator.close)
            iterators.append(iterator)
        return iterators

    return (
        open_split(datasets.train, args.consumed_train_samples),
        open_split(datasets.valid, args.consumed_valid_samples),
    )


def choose_forward_backward(
    args: Arguments,
    plan: Plan | None,
    store: WeightGradStore | None,
    post_validation: PostValidation | None = None,
) -> Callable[..., list[Any]]:
    """Our executor with the schedule that was asked for, or megatron-core's own function, untouched."""
    if plan is None:
        return mcore.get_forward_backward_func()
    assert store is not None
    return run_plan(args, plan, store, post_validation)


def make_data_config(args: Arguments) -> DataConfig:
    """The part of the flags that describes the data."""
    names = DataConfig.__dataclass_fields__
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return DataConfig(**values, create_attention_mask=args.reset_attention_mask)
