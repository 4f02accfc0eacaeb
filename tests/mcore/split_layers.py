"""Two linear layers of megatron-core in one process: what the tests of B and W share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

HIDDEN, OUTPUT, SEQUENCE, BATCH, MICROBATCHES = 16, 24, 5, 2, 3


@contextmanager
def one_rank() -> Iterator[None]:
    """megatron-core's process groups, each with this process alone."""
    substitution = substitute_cuda()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        substitution.restore()


def make_config(dtype: torch.dtype = torch.float32) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )


class Layers(torch.nn.Module):
    """A column-parallel layer, then a row-parallel one, as in every MLP; always with the same weights."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        bias: bool = True,
        skip_bias_add: bool = False,
        num_uses: int = 1,
    ) -> None:
        super().__init__()
        self.num_uses = num_uses
        self.config = make_config(dtype)
        options = {"config": self.config, "init_method": torch.nn.init.xavier_normal_, "bias": bias}
        self.column = ColumnParallelLinear(HIDDEN, OUTPUT, skip_bias_add=skip_bias_add, **options)
        self.row = RowParallelLinear(OUTPUT, HIDDEN, skip_bias_add=skip_bias_add, input_is_parallel=True, **options)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.column, self.row) * self.num_uses:
            x, bias = layer(torch.tanh(x))
            x = x if bias is None else x + bias
        return x


def microbatches(dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Input and output gradient; the gradient is not contiguous, as an attention's is."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(MICROBATCHES, SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype)
    gradients = torch.randn(MICROBATCHES, HIDDEN, BATCH, SEQUENCE, generator=generator).to(dtype).permute(0, 3, 2, 1)
    return [(x.clone().requires_grad_(), gradient) for x, gradient in zip(inputs, gradients, strict=True)]


Gradients = dict[str, torch.Tensor | None]


def gradients_of(model: torch.nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> Gradients:
    parameters = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {**parameters, **{f"input {m}": x.grad for m, (x, _) in enumerate(data)}}


def assert_equal(ours: Gradients, expected: Gradients) -> None:
    """Assert that both hold the same gradients, bit for bit."""
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert ours[name] is None, name
        else:
            assert ours[name].dtype == gradient.dtype
            assert torch.equal(ours[name], gradient), name


def run_fused(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Gradients:
    data = microbatches(dtype)
    for x, gradient in data:
        model(x).backward(gradient)
    return gradients_of(model, data)


def run_split(model: torch.nn.Module, store: WeightGradStore, dtype: torch.dtype = torch.float32) -> Gradients:
    """Run all B's, then all W's, so that each W is as late as it can be; return the gradients."""
    data = microbatches(dtype)
    for m, (x, gradient) in enumerate(data):
        with store.deferring():
            model(x).backward(gradient)
        store.flush(0, m)
    for m in range(MICROBATCHES):
        store.pop(0, m)
    return gradients_of(model, data)
