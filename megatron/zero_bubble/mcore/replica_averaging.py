"""Hierarchical SGD for megatron-core: replicas take optimizer steps with their own gradients, and average parameters.

In mixed precision, the optimizer's fp32 parameters are averaged, and the averages are then copied to the model's
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.utils import get_model_config, unwrap_model

from megatron.zero_bubble.mcore.optimizer import copy_to_model, parts, torch_optimizers
from megatron.zero_bubble.mcore.placement import tied_weights
from megatron.zero_bubble.runtime.group_averager import average, groups_of_replicas
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.schedule.hierarchy import Hierarchy


@dataclass(eq=False)
class ReplicaAveraging:
    """Averages this rank's parameters, and not its gradients, over replicas.

    Create a `ReplicaAveraging` before the first training step.

    Args:
        optimizer: the optimizer that `get_megatron_optimizer` has made.
        chunks: this rank's model chunks, wrapped in DDP.
        averaged_at: the last iteration after which all replicas had the same parameters.
        changed: function that is called when parameters or moments have been averaged.

    Raises:
        ValueError: `optimizer` contains an optimizer whose class does not support averaging.
    """

    hierarchy: Hierarchy
    optimizer: MegatronOptimizer
    chunks: Sequence[Any]
    averaged_at: int
    timeout: InitVar[timedelta]
    changed: Callable[[], None]
    is_local: bool = field(default=False, init=False)
    """Whether the next optimizer step uses only this replica's own gradients."""

    def __post_init__(self, timeout: timedelta) -> None:
        # Subclasses of ChainedOptimizer are refused: their replicas step only a part of the layers.
        for part in (*parts(self.optimizer), self.optimizer):
            if type(part) not in (FP32Optimizer, Float16OptimizerWithFloat16Params, ChainedOptimizer):
                raise ValueError(f"the parameters of megatron-core's {type(part).__name__} cannot be averaged")
        self._groups = _averaging_groups(self.hierarchy, timeout)
        self._begin_local_steps(self.averaged_at)

    def after_step(self, iteration: int) -> int:
        """If an average is due after `iteration`, average parameters over a group of replicas.

        All replicas of the group call `after_step` together. The optimizer step of `iteration` must have been
        validated.

        Returns:
            The number of replicas in the group; 1 if no average is due.
        """
        size = self.hierarchy.group_size_after(iteration)
        if size is not None:
            average(self._parameters(), self._groups[size])
            self._hand_out()
        if size == self.hierarchy.num_replicas or not self.hierarchy.is_local(iteration):
            self.averaged_at = iteration
        self._begin_local_steps(iteration)
        return size or 1

    def average_all(self, iteration: int, *, with_states: bool = False) -> None:
        """Give all replicas the mean of their parameters after `iteration`; a collective call of all ranks.

        Args:
            with_states: whether to average the optimizer's moments, too. With averaged moments, a checkpoint holds the
                state of all replicas, and a job that loads the checkpoint continues like the job that saved it.
        """
        all_replicas = self._groups[self.hierarchy.num_replicas]
        if self.averaged_at != iteration:
            average(self._parameters(), all_replicas)
            self._hand_out()
            self.averaged_at = iteration
        if with_states and self.is_local:
            average(self._moments(), all_replicas)
            self.changed()

    def _begin_local_steps(self, iteration: int) -> None:
        """If the next iteration's step uses each replica's own gradients, reduce gradients only within this replica."""
        if self.is_local or not self.hierarchy.is_local(iteration + 1):
            return
        self.is_local = True
        # The context-parallel group has the ranks of one replica: a single rank without context parallelism.
        replica = parallel_state.get_context_parallel_group()
        for chunk in self.chunks:
            assert not chunk.expert_parallel_bucket_groups, "experts that replicas share"
            for bucket_group in chunk.bucket_groups:
                bucket_group.data_parallel_group = replica
                for bucket in bucket_group.buckets:
                    if not bucket_group.ddp_config.average_in_collective:
                        bucket.gradient_scaling_factor = 1.0 / replica.size()

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in torch_optimizers(self.optimizer):
            for group in optimizer.param_groups:
                yield from group["params"]

    def _moments(self) -> Iterator[torch.Tensor]:
        """Yield the optimizer's state tensors of each parameter, except the number of steps."""
        for optimizer in torch_optimizers(self.optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    yield from (value for name, value in sorted(state.items()) if name != "step")

    def _hand_out(self) -> None:
        _unify_tied_embeddings(self.chunks)
        copy_to_model(self.optimizer)
        self.changed()


def _averaging_groups(hierarchy: Hierarchy, timeout: timedelta) -> dict[int, dist.ProcessGroup]:
    replicas = parallel_state.get_data_parallel_group()
    places = sorted({tuple(ranks) for ranks in from_all_ranks(dist.get_process_group_ranks(replicas))})
    inner = [level.group_size for level in hierarchy.levels[:-1]]
    return {**groups_of_replicas(places, inner, timeout), hierarchy.num_replicas: replicas}


@torch.no_grad()
def _unify_tied_embeddings(chunks: Sequence[Any]) -> None:
    """Copy tied embeddings from the first to the last stage, because averages of the copies may differ in rounding."""
    tied = tied_weights(chunks)
    if tied is not None:
        embedding, last = tied
        _stepped(last).copy_(_stepped(embedding))
        return
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() == 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    model = unwrap_model(chunks[0] if group.rank() == 0 else chunks[-1])
    if model.share_embeddings_and_output_weights or getattr(get_model_config(chunks[0]), "mtp_num_layers", None):
        dist.broadcast(_stepped(model.shared_embedding_or_output_weight()), group_src=0, group=group)


def _stepped(weight: torch.nn.Parameter) -> torch.Tensor:
    """Return the tensor that the optimizer updates for a weight of the model: the fp32 copy if there is one."""
    main = getattr(weight, "main_param", None)
    return (weight if main is None else main).data
