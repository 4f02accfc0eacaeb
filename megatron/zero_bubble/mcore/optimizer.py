"""Gives access to the parts of megatron-core's optimizers, and lets checkpoints of torch's Adam and SGD be loaded.

With neither apex nor Transformer Engine, megatron-core 0.16 saves the state of its distributed optimizer but cannot
load the saved state. When loading, megatron-core reads the number of steps from a state that a new optimizer does not
have yet. megatron-core then looks for the number of steps in every shard's saved tensors, although the number of steps
is not saved there. megatron-core cannot load the state of SGD, because megatron-core has no function that allocates the
state of SGD. From 0.19 on, megatron-core does not load the state of parameters whose learning rate has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as base
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.mcore.shard_checkpoints import optimizer_shards


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers that a chained optimizer consists of, or `[optimizer]` if `optimizer` is not chained."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, base.ChainedOptimizer) else [optimizer]


def torch_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers of torch, apex or Transformer Engine in `optimizer`; [] on a rank without parameters."""
    return [part.optimizer for part in parts(optimizer) if part.optimizer is not None]


def copy_to_model(optimizer: MegatronOptimizer) -> None:
    """Copy the optimizer's parameters to the model's parameters, if optimizer and model use different precisions."""
    for part in parts(optimizer):
        if isinstance(part, base.MixedPrecisionOptimizer) and not part.is_stub_optimizer:
            part._copy_main_params_to_model_params()


def refuse_optimizer(optimizer: MegatronOptimizer) -> None:
    """Check that post-validation can take this optimizer's steps before the norm of all gradients is known.

    Raises:
        ValueError: the optimizer is not supported; the message names the optimizer or its setting.
    """
    kinds = (base.FP32Optimizer, base.Float16OptimizerWithFloat16Params, DistributedOptimizer)
    # Subclasses of ChainedOptimizer are refused: they distribute parameters over replicas in their own way.
    for part in (*parts(optimizer), optimizer):
        if type(part) not in (*kinds, base.ChainedOptimizer):
            raise ValueError(f"megatron-core's optimizer {type(part).__name__} is not supported")
        if getattr(part.config, "grad_norm_skip_threshold", math.inf) < math.inf:
            raise ValueError("grad_norm_skip_threshold is not supported: the norm is known only after the step")
    for each in torch_optimizers(optimizer):
        # A tensor rank decides alone whether it steps, and these modes exchange tensors in the step.
        mode = getattr(each, "tp_mode", None) or getattr(each, "mode", None) or "blockwise"  # `mode` until 0.17
        if mode != "blockwise" and parallel_state.get_tensor_model_parallel_world_size() > 1:
            raise ValueError(
                f"{type(each).__name__} of mode {mode} is not supported with several tensor-parallel ranks: give "
                "--muon-tp-mode blockwise"
            )


def allocate_states(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer state that the first step would create, for every parameter that has no state.

    With allocated states, a checkpoint holds the same tensors before and after the first step. Without allocated
    states, a checkpoint from before the first step could not be loaded. With a loss scale, the first steps of a run are
    often skipped, so that a checkpoint may be saved before the optimizer has taken any step.

    In a stage without experts, for example, the optimizer of the experts has no parameters. An optimizer without
    parameters also gets an entry with the number of steps, because rank 0 saves the number of steps for all ranks.
    """
    for torch_optimizer in torch_optimizers(optimizer):
        if _is_torch_adam(torch_optimizer) and not _has_parameters(torch_optimizer):
            torch_optimizer.state[_STEPS] = {"step": torch.zeros((), dtype=torch.float32)}
        for group in torch_optimizer.param_groups:
            for parameter in group["params"]:
                names = ["momentum_buffer"] if group.get("momentum") else []
                for name in ["step", "exp_avg", "exp_avg_sq"] if _is_torch_adam(torch_optimizer) else names:
                    if name not in torch_optimizer.state[parameter]:
                        first = torch.zeros((), dtype=torch.float32) if name == "step" else torch.zeros_like(parameter)
                        torch_optimizer.state[parameter][name] = first
    _align_steps(optimizer)


_STEPS = "steps"
"""Key of the entry with the number of steps, in the state of an optimizer without parameters."""


def _has_parameters(torch_optimizer: Any) -> bool:
    return any(group["params"] for group in torch_optimizer.param_groups)


def _align_steps(optimizer: MegatronOptimizer) -> None:
    """Set the step count of every Adam state to the largest of these counts, because every step updates all states."""
    adams = filter(_is_torch_adam, torch_optimizers(optimizer))
    states = [state for adam in adams for state in adam.state.values()]
    steps = max((state["step"] for state in states), default=torch.zeros(()))
    for state in states:
        state["step"] = steps.clone()


@contextmanager
def loadable(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Let megatron-core load a checkpoint into `optimizer` inside the `with` block, also with torch's Adam or SGD."""
    allocate_states(optimizer)
    keys = tuple(key for key in base.param_group_identifier_keys if key not in ("max_lr", "min_lr"))
    with ExitStack() as changes:
        # Loading gives all parameters the same tensor `step`, which the step of every parameter would count up.
        changes.callback(_align_steps, optimizer)
        for module in (base, distrib_optimizer):
            changes.enter_context(replaced(module, "param_group_identifier_keys", keys))
        for part in parts(optimizer):
            if part.init_state_fn is None:
                part.init_state_fn = lambda *_: None  # megatron-core calls this function, but SGD has none
            if part.optimizer is not None and not isinstance(part, DistributedOptimizer):
                changes.enter_context(replaced(part, "load_state_dict", _loader_of_shards(part)))
            if _is_torch_adam(part.optimizer):
                changes.enter_context(replaced(part.optimizer, "load_state_dict", _loader_of_any_step(part.optimizer)))
                if isinstance(part, DistributedOptimizer):
                    name = "_set_main_param_and_optimizer_states"
                    changes.enter_context(replaced(part, name, _setter_that_keeps_steps(part)))
        yield


def _is_torch_adam(torch_optimizer: Any) -> bool:
    return isinstance(torch_optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _loader_of_any_step(adam: torch.optim.Optimizer) -> Any:
    """Return a `load_state_dict` that sets a missing number of steps to 0; megatron-core does not save the number 0."""
    load = adam.load_state_dict

    def load_any_step(states: dict[str, Any]) -> None:
        if _has_parameters(adam):
            states["state"].pop(_STEPS, None)  # rank 0 may have saved a part without parameters
        for state in states["state"].values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        load(states)

    return load_any_step


def _loader_of_shards(part: Any) -> Any:
    """Return a `load_state_dict` that also loads the state of parameters that torch's FSDP2 shards."""
    load = part.load_state_dict
    return lambda state: load(optimizer_shards(part, state))


def _setter_that_keeps_steps(shard: Any) -> Any:
    set_states = shard._set_main_param_and_optimizer_states

    def keep_steps(model_parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        steps = shard._get_main_param_and_optimizer_states(model_parameter)["step"]
        set_states(model_parameter, {"step": steps, **tensors})

    return keep_steps


Norm = float | torch.Tensor


def norm_groups(optimizer: MegatronOptimizer) -> list[tuple[list[MegatronOptimizer], dist.ProcessGroup]]:
    """Return one entry for each gradient norm that megatron-core computes.

    An entry contains the optimizers whose gradients the norm includes, and the process group over which the norm is
    reduced.
    """
    if isinstance(optimizer, base.ChainedOptimizer) and optimizer.grads_states_parallel_group_is_shared():
        return [(parts(optimizer), optimizer.get_grad_stats_parallel_group())]
    return [([part], part.get_grad_stats_parallel_group()) for part in parts(optimizer)]


def gradients_of_norm(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Return this rank's gradients that megatron-core includes in the global norm."""
    # The method has the first name up to megatron-core 0.18 and the second name from 0.19 on.
    names = ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm")
    gradients = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    return gradients()


def squared_norm(optimizers: Sequence[MegatronOptimizer]) -> torch.Tensor:
    """Return this rank's term of the squared norm of the gradients, as an fp32 tensor with one element."""
    gradients = [gradient for optimizer in optimizers for gradient in gradients_of_norm(optimizer)]
    device = torch.cuda.current_device()
    if not gradients:
        return torch.zeros(1, dtype=torch.float, device=device)
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
    return norm**2.0


def norm_of_all(squared_norms: Sequence[torch.Tensor]) -> Norm:
    """Return the norm of all gradients, given the reduced squared norm of each entry of `norm_groups()`."""
    norms = [_root(each) for each in squared_norms]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


def _root(squared_norm: torch.Tensor) -> Norm:
    """Return the square root of a squared norm: a tensor if megatron-core can scale by a tensor, else a float."""
    if getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is not None:
        return squared_norm.pow(0.5)
    return squared_norm.item() ** 0.5
