"""A dropped block keeps only its input until R restores it, and only the outer checkpoints of an F are dropped."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from split_layers import one_rank

from megatron.zero_bubble.mcore.checkpointed_blocks import split_checkpoints
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


def test_an_input_that_was_divided_is_whole_again_after_r():
    """The test installs hooks that pack saved tensors, because measuring memory on a CPU does so too."""
    hidden, gradient = torch.rand(2, 1, 4, requires_grad=True), torch.rand(2, 1, 4)
    expected = torch.autograd.grad(hidden.sin(), hidden, gradient)[0]
    store = RecomputationStore()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        store.forward(0, 0, drops=True),
        split_checkpoints(store),
    ):
        output = random.checkpoint(torch.sin, True, hidden)
    assert hidden.shape == (8,)
    store.recompute(0, 0)
    assert hidden.shape == (2, 1, 4)
    output.backward(gradient)
    assert torch.equal(hidden.grad, expected)


def test_a_dropped_block_keeps_only_its_input_until_r():
    store, weight, saved = RecomputationStore(), torch.ones(3, requires_grad=True), []
    hidden = torch.rand(3, requires_grad=True)
    outputs = []

    def block(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        output = (x * weight).exp().sin()
        outputs.append(weakref.ref(output))
        return output, None

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        with store.forward(0, 0, drops=True), split_checkpoints(store):
            dropped, nothing = random.checkpoint(block, False, hidden)
        assert [tensor.data_ptr() for tensor in saved] == [hidden.data_ptr()]
        assert nothing is None
        store.recompute(0, 0)
        assert len(saved) > 3
    assert outputs[-1]() is None, "the output is there already, as the input of the next block"
    dropped.backward(torch.ones(3))
    expected = torch.autograd.grad(block(hidden)[0].sum(), (hidden, weight))
    assert torch.equal(hidden.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_backward_before_r_is_an_error():
    store = RecomputationStore()
    hidden = torch.rand(3, requires_grad=True)
    with store.forward(0, 0, drops=True), split_checkpoints(store):
        output = random.checkpoint(torch.sin, False, hidden)
    with pytest.raises(AssertionError, match="before its R"):
        output.sum().backward()


def test_nothing_is_handed_over_where_no_gradient_is_computed():
    """No block of integers has a gradient. A block of other numbers may have parameters, whatever its inputs need."""
    store = RecomputationStore()
    with store.forward(0, 0, drops=True), split_checkpoints(store):
        assert not random.checkpoint(torch.neg, False, torch.arange(3)).requires_grad
    store.recompute(0, 0)
    with torch.no_grad(), store.forward(0, 1, drops=True), split_checkpoints(store):
        assert not random.checkpoint(torch.sin, False, torch.rand(3)).requires_grad
    store.recompute(0, 1)


def test_only_the_outer_checkpoints_of_an_f_are_split():
    """Outside of F, without a store, and inside a block `checkpoint` is megatron-core's; after an error, too."""
    megatrons, store, seen = random.CheckpointFunction, RecomputationStore(), []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append((random.CheckpointFunction is megatrons, store.current))
        return x

    hidden = torch.rand(3, requires_grad=True)
    for drops in (True, False):
        with store.forward(0, 0, drops=drops), split_checkpoints(store):
            assert random.CheckpointFunction is not megatrons
            random.checkpoint(block, False, hidden)
            assert random.CheckpointFunction is not megatrons
        assert random.CheckpointFunction is megatrons
    store.recompute(0, 0)
    assert seen == [(True, None)] * 3
    for without in (None, store):
        with split_checkpoints(without):
            assert random.CheckpointFunction is megatrons
    with pytest.raises(ZeroDivisionError), store.forward(0, 0, drops=True), split_checkpoints(store):
        raise ZeroDivisionError
    assert random.CheckpointFunction is megatrons
