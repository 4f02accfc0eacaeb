"""A stand-in for Transformer Engine's linear layers with `delay_wgrad_compute`: what its documentation says of them.

Backward computes the input's gradient and queues what W needs; `backward_dw()` computes W of the oldest, leaves it in
`weight.grad` and calls the hooks that were registered. The parameter is marked for megatron-core's DDP.

With `fuse_wgrad_accumulation`, W is added to `weight.main_grad`, and `weight.grad` is left as it is. Backward marks the
weight with `grad_added_to_main_grad` and returns a dummy in place of its gradient, whether W comes at once or later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tests.mcore.split_layers import HIDDEN, OUTPUT, make_config


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: DeferringLinear, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        layer = ctx.layer
        returned = None
        if layer.delay_wgrad_compute:
            layer.queue.append(product)
        elif layer.fuse_wgrad_accumulation:
            weight.main_grad.add_(product)
        else:
            returned = product
        if layer.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            zero_out = getattr(weight, "zero_out_wgrad", False)
            returned = torch.zeros_like(product) if zero_out else torch.full_like(product, float("nan"))
        return None, gradient @ weight, returned


class DeferringLinear(torch.nn.Module):
    """A linear layer that can defer its W; like Megatron's wrappers it returns its output and its bias apart."""

    def __init__(
        self, input_size: int, output_size: int, *, delay_wgrad_compute: bool, fuse_wgrad_accumulation: bool
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))
        self.delay_wgrad_compute = delay_wgrad_compute
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.queue: deque[torch.Tensor] = deque()
        self.hooks: list[Callable[[], None]] = []
        if delay_wgrad_compute:
            self.weight.skip_backward_post_hook = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Linear.apply(self, x, self.weight), None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        gradient = self.queue.popleft()
        if self.fuse_wgrad_accumulation:
            self.weight.main_grad.add_(gradient)
        else:
            self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        for hook in self.hooks:
            hook()


class DeferringLayers(torch.nn.Module):
    """Two deferring layers with the weights of `split_layers.Layers`; optionally recomputed in backward."""

    def __init__(
        self, *, delay_wgrad_compute: bool = True, fuse_wgrad_accumulation: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.config, self.recompute = make_config(), recompute
        options = {
            "delay_wgrad_compute": delay_wgrad_compute,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }
        self.first = DeferringLinear(HIDDEN, OUTPUT, **options)
        self.second = DeferringLinear(OUTPUT, HIDDEN, **options)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return torch.utils.checkpoint.checkpoint(self._forward, x, use_reentrant=True)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x, _ = layer(torch.tanh(x))
        return x
