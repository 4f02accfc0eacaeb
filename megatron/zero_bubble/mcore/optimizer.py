"""megatron-core's optimizers: what they consist of, and loading a checkpoint where torch's Adam takes the steps.

Without apex and Transformer Engine, megatron-core 0.16 saves the state of its distributed optimizer and
cannot load it: it reads the number of steps from a state that a new optimizer does not have yet, and then looks for
that number among the tensors of every shard, where it was not saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that a chained one consists of; any other consists of itself."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def torch_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The torch (apex, Transformer Engine) optimizers inside; none on a rank without parameters."""
    return [part.optimizer for part in parts(optimizer) if part.optimizer is not None]


@contextmanager
def loadable(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within, a checkpoint can be loaded into `optimizer`, whichever Adam takes its steps."""
    shards = [part for part in parts(optimizer) if _is_distributed_torch_adam(part)]
    for shard in shards:
        _allocate(shard.optimizer)
        shard._set_main_param_and_optimizer_states = _setter_that_keeps_steps(shard)
    try:
        yield
    finally:
        for shard in shards:
            del shard._set_main_param_and_optimizer_states
            # They were loaded as one tensor, which every parameter would count up.
            for state in shard.optimizer.state.values():
                state["step"] = state["step"].clone()


def _is_distributed_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, DistributedOptimizer) and isinstance(
        optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW)
    )


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """The state that the first step makes."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}


def _setter_that_keeps_steps(shard: Any) -> Any:
    set_states = shard._set_main_param_and_optimizer_states

    def keep_steps(model_parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        steps = shard._get_main_param_and_optimizer_states(model_parameter)["step"]
        set_states(model_parameter, {"step": steps, **tensors})

    return keep_steps
