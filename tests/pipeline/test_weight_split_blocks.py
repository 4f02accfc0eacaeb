"""Layers that users change, hook or differentiate, and blocks that are split as a whole, have autograd's gradients."""

from __future__ import annotations

import pytest
import torch
from split_runs import MICROBATCHES, assert_same, run
from torch import nn

from megatron.zero_bubble.pipeline.weight_split import split_modules
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


class Block(nn.Module):
    """A layer inside of which torch's own layers are split unless the block is split as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.up = nn.Linear(4, 4), nn.ConvTranspose1d(1, 1, 3, stride=2)

    def forward(self, x, gain=1.0):
        up = self.up(self.inner(x).tanh().unsqueeze(1), output_size=[9])
        return up[..., :4].squeeze(1) * gain


def with_adapter() -> nn.Module:
    block, adapter = Block(), nn.Linear(4, 4)
    original = block.inner.forward
    block.inner.forward = lambda x: original(x) + adapter(x)
    block.adapter = adapter
    return block


def clamp_gradient(weight: nn.Parameter) -> None:
    weight.grad.clamp_(-0.1, 0.1)


def with_hook() -> nn.Module:
    block = Block()
    block.inner.weight.register_post_accumulate_grad_hook(clamp_gradient)
    return block


class Masked(Block):
    """Calls a layer with a weight that is computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.rand(4, 4))

    def forward(self, x):
        return torch.func.functional_call(self.inner, {"weight": self.inner.weight * self.mask}, (x,))


class Transformed(Block):
    """Calls a layer under the transforms of `torch.func`."""

    def forward(self, x):
        return torch.vmap(self.inner)(x) + torch.func.grad(lambda x: self.inner(x).square().sum())(x)


class Differentiated(Block):
    """Differentiates its own output, the first time for a number and the second time with a graph."""

    def forward(self, x):
        output = super().forward(x).square()
        (number,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        (derivative,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output * number + derivative


class DifferentiatedInB(Block):
    """A hook of the backward differentiates another output, as implicit layers do."""

    def forward(self, x):
        output = super().forward(x)
        point = output.detach().requires_grad_()
        again = super().forward(point)
        output.register_hook(lambda g: g + torch.autograd.grad(again, point, g, retain_graph=True)[0])
        return output


@pytest.mark.parametrize("others", [(), (Block,)])
@pytest.mark.parametrize(
    "make", [Block, with_adapter, with_hook, Masked, Transformed, Differentiated, DifferentiatedInB]
)
def test_blocks_patches_and_hooks_get_the_gradients_of_one_backward(make, others):
    """Also if the modules were split before, as when a second pipeline gets the layers of the first one."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    (ours, reference), inputs = made, [torch.randn(5, 4) for _ in range(MICROBATCHES)]
    split_modules([ours], WeightGradStore())
    store = WeightGradStore()
    split = split_modules([ours], store, others)
    assert bool(split) == (make is not with_adapter or not others)
    ours(inputs[0].clone().requires_grad_())  # as a pipeline does before its first step
    expected = run(reference, inputs)
    assert all(map(torch.equal, run(ours, inputs, store), expected))
    for k in range(MICROBATCHES):
        store.pop(0, k)
    assert_same(ours, reference)


def test_a_split_layer_that_is_called_with_two_tensors_is_refused():
    block = Block()
    split_modules([block], WeightGradStore(), (Block,))
    with pytest.raises(ValueError, match="split_layers=Block cannot be split: its forward takes 2 tensors, not one"):
        block(torch.ones(2, 4), gain=torch.ones(4))
