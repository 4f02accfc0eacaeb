"""Builds the tokenizer, model, optimizer and data of `pretrain_gpt.py`, and trains the model."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.timers import Timers
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError
from megatron.zero_bubble.mcore.model_units import release
from megatron.zero_bubble.session.features import check_shards
from megatron.zero_bubble.session.reports import print_line, print_rank_0
from megatron.zero_bubble.session.same_flags import check_same_flags
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.start_up import SessionError
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint import Checkpointer, Progress, TrainingState, unloadable
from megatron.zero_bubble.trainer.checkpoint_files import latest_iteration, tracked
from megatron.zero_bubble.trainer.data import build_datasets, check_rest, needed_tensors
from megatron.zero_bubble.trainer.data_files import check_data
from megatron.zero_bubble.trainer.data_loader import build_data_iterator
from megatron.zero_bubble.trainer.defaults import with_vocabulary
from megatron.zero_bubble.trainer.exit_reasons import ExitReasons
from megatron.zero_bubble.trainer.forward_step import DataIterator
from megatron.zero_bubble.trainer.initialize import initialized
from megatron.zero_bubble.trainer.layout import settle_layout
from megatron.zero_bubble.trainer.logging import TrainingLog
from megatron.zero_bubble.trainer.loop import Trainer, TrainingData
from megatron.zero_bubble.trainer.model import build_model, transformer_config
from megatron.zero_bubble.trainer.optimization import build_lr_scheduler, build_optimizer
from megatron.zero_bubble.trainer.tokenizer import load_tokenizer


def pretrain(args: Arguments, session: Session) -> None:
    """Train a GPT or a hybrid model with flags that `complete_and_check` has completed and checked.

    Args:
        session: the session of the job that the flags describe; `pretrain` closes the session at the end.

    Raises:
        ValueError: the data, tokenizer or checkpoint does not fit the flags, or a checkpoint cannot be written.
    """
    exit_reasons = ExitReasons(args)
    session.make_schedules()
    tokenizer = load_tokenizer(args)
    args = with_vocabulary(args, tokenizer.vocab_size)
    check_shards(session.job.flags, args.padded_vocab_size)
    check_data(args, tokenizer.vocab_size)
    args = without_first_load(args)
    if args.load:
        latest_iteration(args.load)
    with initialized(args, session.job.first_placement), ExitStack() as resources:
        resources.enter_context(session)
        check_same_flags(args)
        args = settle_layout(args, session)
        trainer = build_trainer(args, session, tokenizer, exit_reasons, resources)
        try:
            trainer.train()
        except SessionError:
            raise
        except ValueError as error:
            raise RuntimeError("an internal error, not a mistake in the flags") from error
        session.close()


def without_first_load(args: Arguments) -> Arguments:
    """Remove `--load` from the flags if `--load` and `--save` name the same folder and it has no checkpoint yet."""
    if args.load is None or args.save is None or Path(args.load).resolve() != Path(args.save).resolve():
        return args
    with suppress(CheckpointError):  # `latest_iteration` will raise the same error
        if tracked(args.load) == "none":
            if args.rank == 0:
                print_line(
                    f" > no checkpoint in --load {args.load} yet, which --save writes: training begins at iteration 0"
                )
            return replace(args, load=None)
    return args


def build_trainer(
    args: Arguments,
    session: Session,
    tokenizer: MegatronTokenizerBase,
    exit_reasons: ExitReasons,
    resources: ExitStack,
) -> Trainer:
    """Build model, optimizer and data, load the checkpoint, and start the session.

    Closing `resources` releases the model and the data.

    Raises:
        ValueError: megatron-core refuses the model, or a checkpoint or the data does not fit the flags.
    """
    timers = Timers(args.timing_log_level, "minmax") if args.timing_log_level else None
    config = transformer_config(args, session.job.placement.num_chunks, timers)
    model = build_model(args, config, session)
    optimizer = build_optimizer(args, model, config)
    resources.callback(release, model)
    state = TrainingState(Progress(), model, optimizer, build_lr_scheduler(args, optimizer))
    checkpointer = Checkpointer(args, state)
    if (warning := unloadable(args)) is not None:
        print_rank_0(warning)
    if args.load:
        checkpointer.load()
    session.start(model, optimizer, state.progress.iteration)
    data = open_data(args, state, tokenizer, resources)
    log = TrainingLog(args, state.progress, session.job.log_rank, timers)  # its clock starts here
    return Trainer(args, state, session, checkpointer, log, data, exit_reasons)


def open_data(
    args: Arguments, state: TrainingState, tokenizer: MegatronTokenizerBase, resources: ExitStack
) -> TrainingData:
    """Open the training and validation data, and skip the samples that earlier runs have consumed.

    Closing `resources` closes the data.

    Raises:
        ValueError: the data cannot be read, or too little data is left after the samples that earlier runs have
            consumed.
    """
    stages, progress = [unwrap_model(chunk) for chunk in state.model], state.progress
    reads = [bool(needed_tensors(args, embeds=stage.pre_process, is_last=stage.post_process)) for stage in stages]
    datasets = build_datasets(args, tokenizer, any(reads))
    used = (progress.consumed_train_samples, progress.consumed_valid_samples)
    check_rest(args, datasets.num_samples, progress.iteration, used)
    has_validation = args.eval_iters > 0 and datasets.num_samples[1] > 0
    if args.eval_iters > 0 and not has_validation:
        print_rank_0(" > no validation data: --eval-interval and --eval-iters have no effect")
    place = (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())

    def open_split(split: Any, consumed_samples: int) -> list[DataIterator]:
        built = (build_data_iterator(split, args, consumed_samples, *place) if read else None for read in reads)
        return [None if iterator is None else resources.enter_context(iterator) for iterator in built]

    return TrainingData(
        open_split(datasets.train, progress.consumed_train_samples),
        open_split(datasets.valid, progress.consumed_valid_samples) if has_validation else None,
    )
