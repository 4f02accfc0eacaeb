"""Transformer Engine's layers under a zero-bubble schedule: its own deferral of W, in the order of our store.

Transformer Engine defers the weight gradient of a module that was built with
`delay_wgrad_compute`: backward keeps what W needs in a queue of the module, and `backward_dw()` runs the oldest. It
then calls the hooks that DDP registered, as our own layers do. What is left for us is to say when.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version

from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

OLDEST = "2.8.0"
"""Version of Transformer Engine whose `delay_wgrad_compute` works without fused accumulation of gradients and where
their reduction overlaps: what Megatron-LM's own arguments demand of it."""


def check_transformer_engine() -> None:
    """Raise `ValueError` unless Transformer Engine is there and can defer weight gradients."""
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        raise ValueError("Transformer Engine is not installed") from None
    if Version(found) < Version(OLDEST):
        raise ValueError(f"Transformer Engine {found} cannot defer weight gradients, {OLDEST} and later can")


def defer_weight_gradients(config: Any) -> None:
    """Let the modules that are built from now on with this megatron-core config leave W to `backward_dw()`.

    Set after construction: the config's own check allows it only together with megatron-core's schedule
    for overlapping the communication of experts.
    """
    config.delay_wgrad_compute = True


def defers_by_itself(module: torch.nn.Module) -> bool:
    """Whether this is a module of Transformer Engine that was built to defer its weight gradient."""
    offers = hasattr(module, "backward_dw") and hasattr(module, "register_wgrad_accumulation_and_reduce_hooks")
    return offers and any(deferred_parameters(module))


def deferred_parameters(module: torch.nn.Module) -> list[str]:
    """Names of the parameters whose gradient `backward_dw()` computes."""
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and getattr(parameter, "skip_backward_post_hook", False)
    ]


def put_into_store(module: Any, store: WeightGradStore) -> None:
    """From now on each backward of `module` puts its W into `store`, or ends with it where B and W are fused."""
    parameters = [getattr(module, name) for name in deferred_parameters(module)]

    def compute_weight_grad() -> None:
        for parameter in parameters:
            if is_in_main_grad(parameter):
                parameter.grad = placeholder_gradient(parameter)
        module.backward_dw()

    def on_backward(gradient: torch.Tensor) -> None:
        # The module's own backward comes next, and queues what W needs.
        if store.is_deferring:
            store.put(compute_weight_grad, held=(gradient,), parameter=module)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(compute_weight_grad)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(_drop_dummy_gradient)
    module.register_forward_hook(_on_gradient_of_output(on_backward))


def is_in_main_grad(parameter: Any) -> bool:
    """Whether a kernel adds this weight's gradient to `main_grad` by itself (`gradient_accumulation_fusion`)."""
    return getattr(parameter, "grad_added_to_main_grad", False)


def placeholder_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of `weight`, in the memory of one number, for a gradient that is in `main_grad` already.

    DDP's hook expects a gradient, and adds it where `zero_out_wgrad` is set.
    """
    return weight.detach().new_zeros(1).expand_as(weight)


def _drop_dummy_gradient(parameter: torch.Tensor) -> None:
    """Drop what B returns in place of a gradient that W will add to `main_grad`: it keeps a weight's size of memory."""
    if is_in_main_grad(parameter):
        parameter.grad = None


def _on_gradient_of_output(call: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # A bias that is added elsewhere, or the input of the norm, comes after it.
        result = output[0] if isinstance(output, tuple) else output
        if result.requires_grad:
            result.register_hook(call)

    return hook
