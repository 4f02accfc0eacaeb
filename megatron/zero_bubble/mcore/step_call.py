"""The arguments of one call of the forward-backward function, and checks for settings that schedules do not support."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as mcore
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch.distributed.fsdp import FSDPModule

from megatron.zero_bubble.mcore.buckets import start_missing_reductions
from megatron.zero_bubble.mcore.decoder_models import HYBRID, HYBRID_RECOMPUTES
from megatron.zero_bubble.mcore.fully_sharded import FullyShardedChunk
from megatron.zero_bubble.mcore.placement import finalize_gradients
from megatron.zero_bubble.mcore.refusals import unsupported
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.recomputation import recomputes_blocks

_GROUPS = (
    *("tp", "pp", "cp", "embd", "pos_embd", "dp_cp", "tp_dp_cp", "dp"),
    *("gtp_remat", "expt_gtp_remat", "dp_cp_gtp_remat"),
)
"""The process groups that megatron-core's own schedules use in any supported version; older versions lack some."""


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """The arguments of one call of a forward-backward function, under the names that megatron-core uses.

    `p2p_communicator` is not used, because messages go through the project's own channels.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None
    model: torch.nn.Module | Sequence[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Any = None
    p2p_communicator: Any = None
    pg_collection: ProcessGroupCollection | None = None
    force_all_reduce: bool | None = False

    @cached_property
    def chunks(self) -> list[torch.nn.Module]:
        """This rank's model chunks, in the order of chunk numbers."""
        return list(self.model) if isinstance(self.model, Sequence) else [self.model]

    @property
    def data_iterators(self) -> list[Iterator[Any] | None]:
        """This rank's data iterators, one for each model chunk.

        The iterator of a single chunk may itself be a sequence, such as a pair of iterators.
        """
        data, kind = self.data_iterator, list if len(self.chunks) == 1 else Sequence
        return list(data) if isinstance(data, kind) else [data]

    @cached_property
    def config(self) -> Any:
        """The configuration of the model."""
        return get_model_config(self.chunks[0])

    @cached_property
    def groups(self) -> ProcessGroupCollection:
        """The process groups, by default the groups of megatron-core's own schedules."""
        return self.pg_collection or default_groups()

    @property
    def overlaps_reduction(self) -> bool:
        """Whether gradients are reduced over replicas while the backward runs (`--overlap-grad-reduce`)."""
        ddp_config = getattr(self.chunks[0], "ddp_config", None)
        return ddp_config is not None and ddp_config.overlap_grad_reduce and self.groups.dp_cp.size() > 1

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that passes between stages."""
        return message_shape(
            self.config,
            self.groups.tp,
            self.groups.cp,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=self.decoder_seq_length,
        )

    def finalize(self, placement: Placement, num_tokens: torch.Tensor) -> None:
        """Reduce the gradients of this rank, as megatron-core does at the end of a step."""
        config = self.config
        if config.finalize_model_grads_func is not None and not self.forward_only:
            tokens = num_tokens if config.calculate_per_token_loss else None
            start_missing_reductions(self.chunks, self.force_all_reduce)
            finalize_gradients(config, placement, self.chunks, tokens, self.groups, self.force_all_reduce)


def refuse_unsupported(config: Any, chunks: Sequence[torch.nn.Module], adjust_tensor_shapes_fn: Any) -> None:
    """Check that zero-bubble schedules support the settings in megatron-core's configuration.

    Raises:
        ValueError: an unsupported setting is on, a function of the configuration would never be called, or DDP would
            lose the gradients that W computes.
    """
    for name, value, row in unsupported(config):
        # `defer_weight_gradients` sets `delay_wgrad_compute` after the configuration is built.
        if name != "delay_wgrad_compute":
            given = name if value is True else f"{name} {value!r}"
            raise ValueError(
                f"{given} is not supported by zero-bubble schedules: {row.reason}; {row.instead or 'switch it off'}"
            )
    if adjust_tensor_shapes_fn is not None:
        raise ValueError(
            "adjust_tensor_shapes_fn is not supported by zero-bubble schedules: messages have the shape of the "
            "model's settings; leave it out"
        )
    syncs = getattr(config, "grad_sync_func", None) or []
    for sync in syncs if isinstance(syncs, list) else [syncs]:
        if getattr(sync, "__name__", "") != "start_grad_sync":
            raise ValueError(
                "a grad_sync_func of your own is not supported by zero-bubble schedules, which reduce each bucket of "
                "gradients after its last W: give start_grad_sync of megatron-core's DDP, or leave it out"
            )
    for chunk in chunks:
        ddp_config: Any = getattr(chunk, "ddp_config", None)
        defers = ddp_config is None or ddp_config.delay_wgrad_compute
        if not defers and any(getattr(weight, "skip_backward_post_hook", False) for weight in chunk.parameters()):
            raise ValueError(
                "DistributedDataParallelConfig(delay_wgrad_compute=False) loses the weight gradients that are "
                "deferred: wrap the model with delay_wgrad_compute=True"
            )


def refuse_sharded(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise `ValueError` if torch's FSDP2, which reduces gradients right after B, shards a chunk by itself."""
    for chunk in chunks:
        if not isinstance(chunk, FullyShardedChunk) and any(isinstance(part, FSDPModule) for part in chunk.modules()):
            raise ValueError(
                "torch's FSDP2 loses the weight gradients that are deferred: wrap the model with megatron-core's "
                "DistributedDataParallel, or train with pretrain_gpt.py of this project, which runs FSDP2"
            )


def refuse_unsplit_recomputation(config: Any, model_class: type[Any] | None = None) -> None:
    """Raise `ValueError` if a model cannot run R: the model recomputes nothing, or recomputes only within B.

    Args:
        model_class: the class of the model; None if the class is known to support recomputation.
    """
    if model_class is not None and issubclass(model_class, HYBRID) and not HYBRID_RECOMPUTES:
        raise ValueError(
            f"the schedule recomputes layers, which {HYBRID.__name__} of this megatron-core does not: leave out "
            "--recompute-granularity and --zero-bubble-recompute"
        )
    if not recomputes_blocks(config):
        raise ValueError(
            "a schedule that recomputes needs a model with recompute_granularity 'full', without fp8 and fp4, "
            f"got {config.recompute_granularity!r}"
        )


def default_groups() -> ProcessGroupCollection:
    """Return the process groups that megatron-core's own schedules use by default."""
    known = {field.name for field in fields(ProcessGroupCollection)}
    return ProcessGroupCollection.use_mpu_process_groups(required_pgs=[name for name in _GROUPS if name in known])


def message_shape(config: Any, tp_group: Any, cp_group: Any, **sizes: Any) -> tuple[int, ...]:
    """Return the shape of the tensor that passes between stages; with varying lengths, the shape of the usual length.

    Args:
        config: the configuration of the model.
        tp_group: the tensor-parallel group.
        cp_group: the context-parallel group.
        sizes: `seq_length`, `micro_batch_size` and `decoder_seq_length`, as for megatron-core's `get_tensor_shapes`.
    """
    if config.variable_seq_lengths:
        config = copy.copy(config)
        config.variable_seq_lengths = False  # Otherwise megatron-core returns an empty shape from 0.17 on.
    shapes = mcore.get_tensor_shapes(config=config, tp_group=tp_group, cp_group=cp_group, **sizes)
    return tuple(shapes[0])
