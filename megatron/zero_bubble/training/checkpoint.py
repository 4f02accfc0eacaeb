"""Checkpoints in Megatron-LM's layout: `iter_0000100/` in torch_dist format, and a file that names the latest.

`latest_checkpointed_iteration.txt` is replaced, in one step, only after every rank has written its part:
a checkpoint that was cut short is never picked up.
"""

from __future__ import annotations

import argparse
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.mcore.checkpoint_writer import keep_results_in_process
from megatron.zero_bubble.mcore.optimizer import allocate_states, loadable
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.files import write_file
from megatron.zero_bubble.training.initialize import print_rank_0

TRACKER = "latest_checkpointed_iteration.txt"

_MODEL_SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("max_position_embeddings", "position_embedding_type", "padded_vocab_size", "normalization", "swiglu"),
    *("untie_embeddings_and_output_weights", "disable_bias_linear", "num_experts", "mtp_num_layers"),
)
_OF_ONE_RANK = ("rank", "local_rank")


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int:
    """The iteration of the newest complete checkpoint under `root`.

    Raises:
        ValueError: there is none, or what the tracker file names is not there.
    """
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        raise ValueError(f"--load {root}: no checkpoint there ({TRACKER} is missing)")
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise ValueError(f"--load {root}: {TRACKER} says {text!r}, which is not an iteration")
    folder = checkpoint_folder(root, int(text))
    if not (folder / "metadata.json").is_file():
        raise ValueError(f"--load {root}: {folder.name}, which {TRACKER} names, is missing or incomplete")
    return int(text)


class Checkpointer:
    """Saves and loads one run's state.

    Args:
        args: the run's flags; `iteration` and the consumed samples are read when saving and set when loading.
        model: this rank's chunks, wrapped or not.
    """

    def __init__(
        self,
        args: Arguments,
        model: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self._args = args
        self._chunks = [unwrap_model(chunk) for chunk in model]
        self._optimizer = optimizer
        self._scheduler = scheduler
        keep_results_in_process()

    def save(self) -> None:
        """Write the checkpoint of `args.iteration` under `args.save`; a collective call."""
        assert self._args.save is not None
        root, iteration = Path(self._args.save), self._args.iteration
        folder = checkpoint_folder(root, iteration)
        print_rank_0(f"saving checkpoint at iteration {iteration} to {root} in torch_dist format")
        if dist.get_rank() == 0:
            # What an earlier, interrupted attempt at this iteration may have left.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        metadata = self._new_metadata()
        allocate_states(self._optimizer)
        state = self._sharded_state(metadata, is_loading=False)
        state.update(
            args=self._saved_args(),
            checkpoint_version=3.0,
            iteration=iteration,
            opt_param_scheduler=self._scheduler.state_dict(),
            num_floating_point_operations_so_far=0,
        )
        stored = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
        dist_checkpointing.save(state, str(folder), content_metadata=stored)
        dist.barrier()
        if dist.get_rank() == 0:
            write_file(root / TRACKER, str(iteration))
        dist.barrier()
        print_rank_0(f"  successfully saved checkpoint from iteration {iteration} to {root}")

    def load(self) -> None:
        """Load the newest checkpoint under `args.load`; a collective call.

        Raises:
            ValueError: there is no checkpoint, or it is of another model.
        """
        args = self._args
        assert args.load is not None
        iteration = latest_iteration(args.load)
        folder = str(checkpoint_folder(args.load, iteration))
        common = dist_checkpointing.load_common_state_dict(folder)
        saved = common["args"]
        check_model_shape(args, saved)
        metadata = {**self._new_metadata(), **(dist_checkpointing.load_content_metadata(folder) or {})}
        with_optimizer = not (args.finetune or args.no_load_optim)
        with_rng = not (args.finetune or args.no_load_rng) and self._same_layout(saved)
        with loadable(self._optimizer):
            request = self._sharded_state(metadata, is_loading=True, with_optimizer=with_optimizer, with_rng=with_rng)
            state = dist_checkpointing.load(request, folder)
            self._restore(state, with_optimizer=with_optimizer, with_rng=with_rng)
        if not args.finetune:
            args.iteration = iteration
            args.consumed_train_samples = saved.consumed_train_samples
            args.consumed_valid_samples = saved.consumed_valid_samples
        print_rank_0(f"  successfully loaded checkpoint from {args.load} at iteration {iteration}")

    def _sharded_state(
        self, metadata: dict[str, Any], *, is_loading: bool, with_optimizer: bool = True, with_rng: bool = True
    ) -> dict[str, Any]:
        """What is spread over the ranks, as megatron-core describes it."""
        state: dict[str, Any] = {}
        for index, chunk in enumerate(self._chunks):
            key = "model" if len(self._chunks) == 1 else f"model{index}"
            state[key] = chunk.sharded_state_dict(metadata=metadata)
        if with_optimizer:
            state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        if with_rng:
            state["rng_state"] = _rng_state()
        return state

    def _restore(self, state: dict[str, Any], *, with_optimizer: bool, with_rng: bool) -> None:
        for index, chunk in enumerate(self._chunks):
            chunk.load_state_dict(state["model" if len(self._chunks) == 1 else f"model{index}"])
        if with_optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
        else:
            self._optimizer.reload_model_params()
        if not self._args.finetune:
            self._restore_scheduler(state["opt_param_scheduler"])
        if with_rng:
            _set_rng_state(state["rng_state"][0])

    def _restore_scheduler(self, state: dict[str, Any]) -> None:
        try:
            self._scheduler.load_state_dict(state)
        except AssertionError as error:
            reason = " ".join(str(error).removeprefix("OptimizerParamScheduler: ").split()).replace(
                "checkpointvalue", "checkpoint value"
            )
            raise ValueError(
                f"--load {self._args.load}: the learning rate's schedule was another one ({reason}): give the flags of "
                "that run, --override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler"
            ) from error

    def _new_metadata(self) -> dict[str, Any]:
        return {
            # Loads under any layout of ranks; the other kind only under the same data-parallel size.
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }

    def _saved_args(self) -> argparse.Namespace:
        """The flags under Megatron-LM's names, without what differs between ranks."""
        values = {name: value for name, value in asdict(self._args).items() if name not in _OF_ONE_RANK}
        return argparse.Namespace(**values)

    def _same_layout(self, saved: argparse.Namespace) -> bool:
        names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
        if self._args.expert_model_parallel_size > 1:
            names += ["expert_model_parallel_size", "world_size"]
        same = all(getattr(saved, name, None) == getattr(self._args, name) for name in names)
        if not same:
            print_rank_0("  the checkpoint has another layout of ranks: its random state is not loaded")
        return same


def check_model_shape(args: Arguments, saved: argparse.Namespace) -> None:
    """Raise `ValueError` if the checkpoint with the flags `saved`, ours or Megatron-LM's, is of another model."""
    pairs = {name: (getattr(args, name), getattr(saved, name, None)) for name in _MODEL_SHAPE}
    pairs["num_query_groups"] = (args.num_query_groups, _saved_query_groups(saved))
    for name, (ours, theirs) in pairs.items():
        if theirs is not None and theirs != ours:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {ours}: the checkpoint in --load {args.load} was saved with {theirs}")


def _saved_query_groups(saved: argparse.Namespace) -> int | None:
    """Without `--group-query-attention` every head is a group, but Megatron-LM saves its default, 1."""
    grouped = getattr(saved, "group_query_attention", True)
    return getattr(saved, "num_query_groups" if grouped else "num_attention_heads", None)


def _rng_state() -> ShardedObject:
    """The state of every generator of this rank."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    place = [
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
        (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
    ]
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        # Experts draw from a generator that differs between the replicas.
        place.append((replica, parallel_state.get_data_parallel_world_size(with_context_parallel=True)))
        replica = 0
    ranks, sizes = zip(*place, strict=True)
    return ShardedObject("rng_state", [state], sizes, ranks, replica_id=replica)


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
