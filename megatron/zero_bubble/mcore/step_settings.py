"""Reads the settings of a step from megatron-core's configuration, and refuses those that schedules cannot honour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.zero_bubble.mcore.decoder_models import HYBRID, HYBRID_RECOMPUTES
from megatron.zero_bubble.mcore.refusals import unsupported
from megatron.zero_bubble.schedule.recomputation import recomputes_blocks


def refuse_unsupported(config: Any, chunks: Sequence[torch.nn.Module], adjust_tensor_shapes_fn: Any) -> None:
    """Check that megatron-core's settings can be honoured by zero-bubble schedules.

    Raises:
        ValueError: an unsupported setting is on, or DDP would lose the gradients that W computes.
    """
    for name, value, row in unsupported(config):
        # This project sets it, for Transformer Engine, once the configuration is made.
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
    for chunk in chunks:
        _refuse_lost_gradients(chunk)


def refuse_unsplit_recomputation(config: Any, model_class: type[Any] | None = None) -> None:
    """Raise `ValueError` if the schedule is to recompute a model that does not, or whose B does.

    Args:
        model_class: the class of the model, if it is not known to recompute.
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


def _refuse_lost_gradients(chunk: torch.nn.Module) -> None:
    """Raise an error if DDP would lose W's gradients: without `delay_wgrad_compute` it takes gradients in B only."""
    ddp_config: Any = getattr(chunk, "ddp_config", None)
    if ddp_config is None or ddp_config.delay_wgrad_compute:
        return
    if any(getattr(parameter, "skip_backward_post_hook", False) for parameter in chunk.parameters()):
        raise ValueError(
            "DistributedDataParallelConfig(delay_wgrad_compute=False) loses the weight gradients that are deferred: "
            "wrap the model with delay_wgrad_compute=True"
        )


def default_groups() -> ProcessGroupCollection:
    """Return the process groups that megatron-core's own schedules use by default."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups
