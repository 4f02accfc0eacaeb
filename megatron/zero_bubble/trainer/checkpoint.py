"""Saves and loads checkpoints with Megatron-LM's folder names and tracker file, in torch_dist format."""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError, load, read_metadata
from megatron.zero_bubble.mcore.checkpoint_writing import save
from megatron.zero_bubble.mcore.optimizer import allocate_states, loadable
from megatron.zero_bubble.mcore.shard_checkpoints import sharded_optimizer_state, sharded_state, shards_of
from megatron.zero_bubble.runtime.joint import jointly, on_rank
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.start_up import SessionError
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint_files import (
    begin_folder,
    check_complete,
    checkpoint_folder,
    incomplete_folder,
    latest_iteration,
    loading,
    name_latest,
    read_checked,
    tracked,
)
from megatron.zero_bubble.trainer.checkpoint_flags import (
    DECOUPLED_RATES,
    check_model_shape,
    check_optimizer,
    check_schedule,
    has_same_ranks,
    reordered_data,
)

_OF_ONE_RANK = ("rank", "local_rank")
"""Flags that are not saved in checkpoints, because their values differ between ranks."""
_SHARDING: Mapping[str, Any] = {
    # Only fully reshardable checkpoints can be loaded with a different data-parallel size.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""Settings with which megatron-core shards the state in new checkpoints."""


@dataclass
class Progress:
    """Numbers of iterations and sequences that this run and the earlier runs of the same training have processed."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0


class TrainingState(NamedTuple):
    """The parts of this rank's training state that a checkpoint contains."""

    progress: Progress
    model: list[Any]
    """The model chunks, with or without their wrappers for data parallelism."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


class Checkpointer:
    """Saves the training state `state` to checkpoints, and loads checkpoints into `state`."""

    def __init__(self, args: Arguments, state: TrainingState) -> None:
        self._args = args
        self._progress, model, self._optimizer, self._scheduler = state
        keys = ["model"] if len(model) == 1 else [f"model{index}" for index in range(len(model))]
        self._chunks = dict(zip(keys, map(unwrap_model, model), strict=True))

    def save(self) -> None:
        """Write a checkpoint of the last complete iteration to a folder under `args.save`; a collective call.

        Raises:
            SessionError: on every rank, if any rank cannot write to the checkpoint. After a failed save, the previous
                checkpoint is still the latest checkpoint.
        """
        assert self._args.save is not None
        root, iteration = Path(self._args.save), self._progress.iteration
        print_rank_0(f"saving checkpoint at iteration {iteration} to {root} in torch_dist format")
        try:
            folder = on_rank(0, lambda: begin_folder(root, iteration))
            self._write(folder)
            on_rank(0, lambda: name_latest(root, iteration))
        except (CheckpointError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            if dist.get_rank() == 0:
                shutil.rmtree(incomplete_folder(root, iteration), ignore_errors=True)
            raise SessionError(
                f"--save {root}: iteration {iteration} cannot be saved: {reason} (latest there: {tracked(root)})"
            ) from error
        print_rank_0(f"  successfully saved checkpoint from iteration {iteration} to {root}")

    def _write(self, folder: Path) -> None:
        """Write the training states of all ranks to `folder`, and check that every checkpoint file is complete."""
        allocate_states(self._optimizer)
        state = self._sharded_state(_SHARDING, is_loading=False)
        flags = {**asdict(self._args), **asdict(self._progress)}  # under Megatron-LM's names
        state.update(
            args=argparse.Namespace(**{name: value for name, value in flags.items() if name not in _OF_ONE_RANK}),
            checkpoint_version=3.0,
            iteration=self._progress.iteration,
            opt_param_scheduler=self._scheduler.state_dict(),
            num_floating_point_operations_so_far=0,
        )
        save(state, folder, dict(_SHARDING))
        on_rank(0, lambda: check_complete(folder, read_metadata(folder)))

    def load(self) -> None:
        """Load the checkpoint that the tracker file under `args.load` names; a collective call.

        Raises:
            ValueError: on every rank, if there is no checkpoint, or if the checkpoint is damaged or belongs to another
                model.
        """
        args = self._args
        assert args.load is not None
        # Rank 0 alone decides which checkpoint is the latest, because another job may be saving in the same folder.
        iteration = on_rank(0, lambda: latest_iteration(str(args.load)))
        folder = checkpoint_folder(args.load, iteration)
        with loading(folder):
            common = self._load(folder)
        if not args.finetune:
            self._progress.iteration = iteration
            self._progress.consumed_train_samples = common["args"].consumed_train_samples
            self._progress.consumed_valid_samples = common["args"].consumed_valid_samples
            if (line := reordered_data(args, common["args"])) is not None:
                print_rank_0(line)
        print_rank_0(f"  successfully loaded checkpoint from {args.load} at iteration {iteration}")

    def _load(self, folder: Path) -> dict[str, Any]:
        """Load the training state from `folder`, and return the part of the checkpoint that is common to all ranks."""
        args = self._args
        with_optimizer = not (args.finetune or args.no_load_optim)
        needed = ("args", "opt_param_scheduler") if with_optimizer else ("args",)
        description, common = jointly(lambda: read_checked(folder, needed))
        check_model_shape(args, common["args"])
        if with_optimizer:
            ours = _schedule(self._scheduler.state_dict(), args)
            check_schedule(args, ours, _schedule(common["opt_param_scheduler"], common["args"]))
            check_optimizer(args, common["args"])
        sharding = {**_SHARDING, **common.get("content_metadata", {})}
        with_rng = not (args.finetune or args.no_load_rng)
        if with_rng and not (
            has_same_ranks(args, common["args"]) and _rng_state(args).unique_key in description.state_dict_metadata
        ):
            with_rng = False
            print_rank_0("  the checkpoint has no random states of this layout of ranks: none are loaded")
        with loadable(self._optimizer):
            request = self._sharded_state(sharding, is_loading=True, with_optimizer=with_optimizer, with_rng=with_rng)
            state = load(request, folder, description)
            for key, chunk in self._chunks.items():
                chunk.load_state_dict(shards_of(chunk, state.get(key, {})))  # a stage may have no parameters
            if with_optimizer:
                self._optimizer.load_state_dict(state["optimizer"])
                self._restore_scheduler(state["opt_param_scheduler"], common["args"])
            else:
                self._optimizer.reload_model_params()
            if with_rng:
                for name, (_, set_state) in _generators().items():
                    set_state(state["rng_state"][0][name])
        return common

    def _sharded_state(
        self, sharding: Mapping[str, Any], *, is_loading: bool, with_optimizer: bool = True, with_rng: bool = True
    ) -> dict[str, Any]:
        """Return the sharded state dictionary of this rank in the form that megatron-core saves and loads."""
        metadata = {**sharding, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state: dict[str, Any] = {key: sharded_state(chunk, metadata) for key, chunk in self._chunks.items()}
        if with_optimizer:
            state["optimizer"] = sharded_optimizer_state(self._optimizer, state, metadata, is_loading=is_loading)
        if with_rng:
            state["rng_state"] = _rng_state(self._args)
        return state

    def _restore_scheduler(self, state: dict[str, Any], saved: argparse.Namespace) -> None:
        scheduler = self._scheduler
        scheduler.load_state_dict(state)
        rates = saved if self._args.use_checkpoint_opt_param_scheduler else self._args
        for group in self._optimizer.param_groups:
            # The optimizer's groups now hold the checkpoint's rates, and the scheduler prefers a group's rates.
            group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr
            if group["is_decoupled_lr"]:
                max_lr, min_lr = getattr(rates, "decoupled_lr", None), getattr(rates, "decoupled_min_lr", None)
                group["max_lr"] = scheduler.max_lr if max_lr is None else max_lr
                group["min_lr"] = scheduler.min_lr if min_lr is None else min_lr
        scheduler.step(0)


def _schedule(state: dict[str, Any], flags: Arguments | argparse.Namespace) -> dict[str, Any]:
    """Return the learning-rate scheduler's state, with the separate learning rates of embedding and output layer."""
    return {**state, **{name: vars(flags)[name] for name in DECOUPLED_RATES if name in vars(flags)}}


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return functions that get and set each random state, in a dictionary with Megatron-LM's names as keys."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return {
        "random_rng_state": (random.getstate, random.setstate),
        "np_rng_state": (np.random.get_state, np.random.set_state),
        "torch_rng_state": (torch.get_rng_state, torch.set_rng_state),
        "cuda_rng_state": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        "rng_tracker_states": (tracker.get_states, tracker.set_states),
    }


def _rng_state(args: Arguments) -> ShardedObject:
    """Return the state of all random generators of this rank, as a sharded object."""
    state = {name: get() for name, (get, _) in _generators().items()}
    place = [
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
        (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
    ]
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    num_replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if args.expert_model_parallel_size > 1 or (args.variable_seq_lengths and num_replicas > 1):
        # The states differ between replicas: experts draw from a generator of their own, and dropout draws more numbers
        # for longer sequences.
        place.append((replica, num_replicas))
        replica = 0
    ranks, sizes = zip(*place, strict=True)
    return ShardedObject("rng_state", [state], sizes, ranks, replica_id=replica)


def unloadable(args: Arguments) -> str | None:
    """A warning if the training saves checkpoints that `--load` refuses; None if `--load` accepts them."""
    if args.save is None or args.fp8_format is None:
        return None
    return (
        f" > --fp8-format {args.fp8_format} with --save: this trainer loads no checkpoint with the state of FP8 "
        "training, which Transformer Engine pickles; to resume, train with Megatron-LM under python -m "
        "megatron.zero_bubble"
    )
