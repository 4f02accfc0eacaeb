"""megatron-core's optimizers: what they consist of, and checkpoints of them where torch's Adam or SGD takes the steps.

Without apex and Transformer Engine, megatron-core 0.16 saves the state of its distributed optimizer and
cannot load it: it reads the number of steps from a state that a new optimizer does not have yet, and then looks for
that number among the tensors of every shard, where it was not saved. SGD's it saves and cannot load either, for lack
of a function that allocates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that a chained one consists of; any other consists of itself."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def torch_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The torch (apex, Transformer Engine) optimizers inside; none on a rank without parameters."""
    return [part.optimizer for part in parts(optimizer) if part.optimizer is not None]


def check_optimizer(optimizer: MegatronOptimizer) -> None:
    """Refuse an optimizer whose steps cannot be taken before it is known what all gradients are like.

    Raises:
        ValueError: which optimizer or setting of it.
    """
    kinds = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
    for part in parts(optimizer):
        if type(part) not in kinds:
            raise ValueError(f"the steps of megatron-core's {type(part).__name__} cannot be taken ahead")
        if getattr(part.config, "grad_norm_skip_threshold", math.inf) < math.inf:
            raise ValueError("grad_norm_skip_threshold skips steps by the norm, which is known later")


def gradients_of_norm(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """The gradients of this rank that megatron-core takes the norm of."""
    # Until 0.18 the function has the first name, since 0.19 the second.
    names = ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm")
    gradients = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    return gradients()


def allocate_states(optimizer: MegatronOptimizer) -> None:
    """Give every parameter the state that its first step would make, where it has none.

    A checkpoint then holds the same tensors before and after the first step: with a loss scale the first iterations
    of a run are often skipped, and what has no state cannot be loaded.
    """
    for torch_optimizer in torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            for parameter in group["params"]:
                for name in _state_names(torch_optimizer, group):
                    if name not in torch_optimizer.state[parameter]:
                        torch_optimizer.state[parameter][name] = _first_state(name, parameter)


def _state_names(torch_optimizer: Any, group: dict[str, Any]) -> tuple[str, ...]:
    """What torch's optimizers keep for a parameter; apex's and Transformer Engine's Adam are allocated elsewhere."""
    if _is_torch_adam(torch_optimizer):
        return ("step", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group.get("momentum") else ()


def _first_state(name: str, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32) if name == "step" else torch.zeros_like(parameter)


@contextmanager
def loadable(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within, a checkpoint can be loaded into `optimizer`, whatever takes its steps."""
    allocate_states(optimizer)
    for part in parts(optimizer):
        if part.init_state_fn is None:
            part.init_state_fn = _nothing_to_allocate
    shards = [part for part in parts(optimizer) if _is_distributed_torch_adam(part)]
    for shard in shards:
        shard._set_main_param_and_optimizer_states = _setter_that_keeps_steps(shard)
    adams = [one for one in torch_optimizers(optimizer) if _is_torch_adam(one)]
    for adam in adams:
        adam.load_state_dict = _loader_of_any_step(adam)
    try:
        yield
    finally:
        for adam in adams:
            del adam.load_state_dict
        for shard in shards:
            del shard._set_main_param_and_optimizer_states
            # They were loaded as one tensor, which every parameter would count up.
            for state in shard.optimizer.state.values():
                state["step"] = state["step"].clone()


def _nothing_to_allocate(*arguments: Any) -> None:
    """In place of SGD's `init_state_fn`: megatron-core calls it, and has none."""


def _is_torch_adam(torch_optimizer: Any) -> bool:
    return isinstance(torch_optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _is_distributed_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, DistributedOptimizer) and _is_torch_adam(optimizer.optimizer)


def _loader_of_any_step(adam: torch.optim.Optimizer) -> Any:
    """Adam's `load_state_dict` that takes states without a number of steps: megatron-core saves none that is zero."""
    load = adam.load_state_dict

    def load_any_step(states: dict[str, Any]) -> None:
        for state in states["state"].values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        load(states)

    return load_any_step


def _setter_that_keeps_steps(shard: Any) -> Any:
    set_states = shard._set_main_param_and_optimizer_states

    def keep_steps(model_parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        steps = shard._get_main_param_and_optimizer_states(model_parameter)["step"]
        set_states(model_parameter, {"step": steps, **tensors})

    return keep_steps
