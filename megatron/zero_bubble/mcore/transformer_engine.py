"""Runs the deferred W of Transformer Engine's modules in the order of the weight-gradient store.

Transformer Engine itself defers the weight gradient of a module that was built with `delay_wgrad_compute`. The backward
of a module with `delay_wgrad_compute` puts the inputs of W into a queue. A later call of the module's `backward_dw()`
runs the oldest W of the queue and calls the hooks that DDP registered. A zero-bubble schedule only determines when
`backward_dw()` is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakSet

import torch
from packaging.version import Version

from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.mcore.weight_grad import (
    OWN,
    MicrobatchSum,
    MicrobatchSums,
    has_hooks,
    is_in_main_grad,
    placeholder_gradient,
)
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

OLDEST = "2.8.0"
"""The oldest supported version of Transformer Engine. Megatron-LM requires 2.8.0 for `delay_wgrad_compute` with
overlapped reduction of gradients, and 2.7.0 for `delay_wgrad_compute` without fused accumulation of gradients."""


def check_transformer_engine() -> None:
    """Raise `ValueError` unless Transformer Engine is installed in a version that can defer weight gradients."""
    try:
        installed = version("transformer-engine")
    except PackageNotFoundError:
        raise ValueError("Transformer Engine is not installed") from None
    if Version(installed) < Version(OLDEST):
        raise ValueError(f"Transformer Engine {installed} cannot defer weight gradients, {OLDEST} and later can")


def defer_weight_gradients(config: Any) -> None:
    """Set `delay_wgrad_compute`, so that modules built with this megatron-core config leave W to `backward_dw()`.

    `delay_wgrad_compute` is set after the construction of the config, because the constructor allows the setting only
    together with megatron-core's schedule for overlapping the communication of experts.
    """
    config.delay_wgrad_compute = True


def defers_by_itself(module: torch.nn.Module) -> bool:
    """Tell whether `module` is a module of Transformer Engine that was built to defer its weight gradient."""
    offers = hasattr(module, "backward_dw") and hasattr(module, "register_wgrad_accumulation_and_reduce_hooks")
    return offers and any(deferred_parameters(module))


def deferred_parameters(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters whose gradient `backward_dw()` computes."""
    named = module.named_parameters(recurse=False)
    return [name for name, part in named if part.requires_grad and getattr(part, "skip_backward_post_hook", False)]


_IN_STORE: WeakSet[torch.nn.Module] = WeakSet()
"""The modules that put their W into a store."""
_HOOKS = "zero_bubble_hooks_of_ddp"
"""Name of a module's attribute: the list of the hooks that DDP has registered for the module's deferred gradients."""


def compute_in_backward(models: Iterable[torch.nn.Module]) -> None:
    """Let Transformer Engine's modules in `models` compute W in their backward, unless they put W into a store.

    The backward of any other module built to defer W would queue W, and no code would run W.
    """
    for module in {inside for model in models for inside in model.modules()}:
        if module not in _IN_STORE and defers_by_itself(module):
            _set_deferral(module, False)


def _set_deferral(module: Any, is_on: bool) -> None:
    # A module without a `wgrad_store` cannot switch deferral off.
    if getattr(module, "wgrad_store", None) is not None:
        module.wgrad_store.enabled = is_on


def _run_oldest(module: Any) -> None:
    """Run the oldest W of a module's queue; megatron-core's `backward_dw()` does so only if its config is set."""
    config = getattr(module, "config", None)
    with nullcontext() if config is None else replaced(config, "delay_wgrad_compute", True):
        module.backward_dw()


def put_into_store(module: Any, store: WeightGradStore) -> None:
    """Make each backward of `module` put its W into `store`.

    If `store` is not deferring, W runs at the end of the backward. If a forward uses the module several times, DDP's
    hooks run after the last W of the microbatch, with the sum of the gradients.

    Transformer Engine computes the gradient of the bias in B, not in W, in two cases: in fp8, and if the caller of the
    module adds the bias. A bias gradient that B has computed is kept until the W of the same microbatch, because each
    call of DDP's hook adds one microbatch's gradient to `main_grad`.
    """
    if module in _IN_STORE:  # DDP wraps the module again, and will register its new hooks
        vars(module)[_HOOKS].clear()
        return
    _IN_STORE.add(module)
    _set_deferral(module, True)
    for name in getattr(module, "bias_names", ()) if module.use_bias else ():
        # With `use_cpu_initialization` megatron-core has replaced the bias that Transformer Engine had marked.
        getattr(module, name).skip_backward_post_hook = True
    parameters = [getattr(module, name) for name in deferred_parameters(module)]
    sums = {parameter: MicrobatchSums(store) for parameter in parameters}
    of_b: dict[torch.Tensor, deque[torch.Tensor]] = {}
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    hooks: list[Callable[[], None]] = []
    vars(module)[_HOOKS] = hooks
    # DDP's hooks are not registered with the module, because `backward_dw()` would call them for each term of a sum.
    module.register_wgrad_accumulation_and_reduce_hooks = hooks.append

    def compute_weight_grad(totals: list[MicrobatchSum]) -> None:
        for parameter in parameters:
            if is_in_main_grad(parameter):
                parameter.grad = placeholder_gradient(parameter)
            elif parameter in of_b:
                # B may have one gradient for all uses of the module, which the first W takes.
                parameter.grad = of_b[parameter].popleft() if of_b[parameter] else placeholder_gradient(parameter)
        _run_oldest(module)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total.add(parameter.grad, parameter)
        if all(total.num_missing == 0 for total in totals):
            for hook in hooks:
                hook()

    def on_backward(gradient: torch.Tensor) -> None:
        # The module's own backward runs next and queues the inputs of W.
        run = partial(compute_weight_grad, [sums[parameter].expect() for parameter in parameters])
        if store.is_deferring:
            store.put(run, held=(gradient,), parameter=module)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(run)

    def on_gradient_of_b(parameter: torch.Tensor) -> None:
        # For a weight whose W adds to `main_grad`, B's gradient is a dummy as large as the weight.
        if parameter.grad is not None and not is_in_main_grad(parameter):
            of_b.setdefault(parameter, deque()).append(parameter.grad)
        parameter.grad = None

    def on_forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if any(has_hooks(parameter) for parameter in parameters):
            raise ForwardStepError(
                f"a parameter of {module} has a hook, but Transformer Engine defers weight gradients and calls no "
                "hooks: remove the hook, or use --transformer-impl local"
            )
        # A tuple holds, after the result, a bias that is added elsewhere or the input of the norm.
        result = output[0] if isinstance(output, tuple) else output
        # A weight may have been frozen since, for example in a model that is wrapped in DDP before it gets adapters.
        if result.requires_grad and any(weight.requires_grad for weight in weights):
            result.register_hook(on_backward)

    setattr(on_gradient_of_b, OWN, True)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient_of_b)
    module.register_forward_hook(on_forward)
