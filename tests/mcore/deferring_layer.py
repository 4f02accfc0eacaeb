"""A stand-in for Transformer Engine's linear layers with `delay_wgrad_compute`: what its documentation says of them.

Backward computes the input's gradient and queues what W needs; `backward_dw()` computes W of the oldest, leaves it in
`weight.grad` and calls the hooks that were registered. The parameter is marked for megatron-core's DDP.

The gradient of a bias comes with W (as in bf16), or in B (as in fp8), or from the caller, who adds the bias. Backward
marks the bias, too, and `backward_dw()` takes the gradient that it finds in `bias.grad`, or that of W.

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
    def forward(
        ctx: Any, layer: DeferringLinear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        layer = ctx.layer
        returned = of_bias = None
        if ctx.has_bias:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        if not ctx.needs_input_grad[2]:  # a frozen weight
            return None, gradient @ weight, None, of_bias
        if layer.delay_wgrad_compute:
            comes_with_w = layer.bias_gradient == "in W"
            layer.queue.append((product, of_bias if comes_with_w else None))
            of_bias = None if comes_with_w else of_bias
        elif layer.fuse_wgrad_accumulation:
            weight.main_grad.add_(product)
        else:
            returned = product
        if layer.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            zero_out = getattr(weight, "zero_out_wgrad", False)
            returned = torch.zeros_like(product) if zero_out else torch.full_like(product, float("nan"))
        return None, gradient @ weight, returned, of_bias


class DeferringLinear(torch.nn.Module):
    """A linear layer that can defer its W; like Megatron's wrappers it returns its output and its bias apart."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        delay_wgrad_compute: bool,
        fuse_wgrad_accumulation: bool,
        bias_gradient: str | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))
        self.bias = None if bias_gradient is None else torch.nn.Parameter(torch.empty(output_size))
        self.bias_gradient, self.use_bias, self.bias_names = bias_gradient, self.bias is not None, ["bias"]
        self.delay_wgrad_compute = delay_wgrad_compute
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.queue: deque[tuple[torch.Tensor, torch.Tensor | None]] = deque()
        self.hooks: list[Callable[[], None]] = []
        if delay_wgrad_compute:
            self.weight.skip_backward_post_hook = True  # megatron-core may have replaced the bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.bias_gradient == "from the caller":
            return _Linear.apply(self, x, self.weight, None), self.bias
        return _Linear.apply(self, x, self.weight, self.bias), None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        gradient, of_bias = self.queue.popleft()
        if self.fuse_wgrad_accumulation:
            self.weight.main_grad.add_(gradient)
        else:
            self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        if self.bias is not None and self.bias.grad is None:
            assert of_bias is not None, "'NoneType' object has no attribute 'to'"
            self.bias.grad = of_bias
        for hook in self.hooks:
            hook()


class DeferringLayers(torch.nn.Module):
    """Two deferring layers with the weights of `split_layers.Layers`; optionally recomputed in backward."""

    def __init__(
        self,
        *,
        delay_wgrad_compute: bool = True,
        fuse_wgrad_accumulation: bool = False,
        recompute: bool = False,
        bias_gradient: str | None = None,
        num_uses: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.recompute, self.num_uses = make_config(), recompute, num_uses
        options = {
            "delay_wgrad_compute": delay_wgrad_compute,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "bias_gradient": bias_gradient,
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
        for layer in (self.first, self.second) * self.num_uses:
            x, bias = layer(torch.tanh(x))
            x = x if bias is None else x + bias
        return x
