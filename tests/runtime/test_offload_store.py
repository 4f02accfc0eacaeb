"""Activations that F saves go to the host and come back bit for bit: each storage once, parameters never."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from megatron.zero_bubble.runtime.copy_lane import ThreadLink
from megatron.zero_bubble.runtime.offload_store import SMALLEST, OffloadStore
from megatron.zero_bubble.schedule import OpKind

ROWS, WIDTH = 64, 64
BYTES = ROWS * WIDTH * 4
assert BYTES >= SMALLEST


def data(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=dtype).requires_grad_()


def round_trip(store: OffloadStore) -> tuple[int, int, int]:
    """Copy what the F of microbatch 0 has saved to the host and back; the bytes on the device after F, D and H."""
    held = [store.device_bytes(0, 0)]
    store.wait(0, 0)
    store.release(0, 0)
    held.append(store.device_bytes(0, 0))
    store.bring_back(0, 0)
    store.wait(0, 0)
    return (*held, store.device_bytes(0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_without_a_store(dtype):
    layers = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)),
        *(torch.nn.Linear(4 * WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)),
    ).to(dtype)
    store, gradients = OffloadStore(ThreadLink()), []
    for offloads in (False, True):
        torch.manual_seed(1)
        x = data(dtype)
        if offloads:
            with store.forward(0, 0, [x]):
                loss = layers(x).square().sum()
            after_f, after_d, after_h = round_trip(store)
            assert after_d < after_f / 2
            assert after_h == after_f
        else:
            loss = layers(x).square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *layers.parameters()]))
        store.forget(0, 0)
    assert all(map(torch.equal, *gradients))
    assert store.left() == []


def test_a_storage_is_copied_once_and_its_views_come_back_as_they_were():
    store, x = OffloadStore(ThreadLink()), data()
    with store.forward(0, 0):
        y = x.exp()  # saves its output
        loss = (y.t()[3:] * y[:, 2:63].t()).sum() + y.view(-1)[::7].square().sum()
        expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
        del y
    after_f, after_d, _ = round_trip(store)
    assert store.buffers.num_bytes == BYTES
    assert after_f - after_d == BYTES
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_parameters_kept_tensors_and_small_ones_stay():
    store, x, few = OffloadStore(ThreadLink()), data(), torch.ones(3, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    with store.forward(0, 0, [x, None]):
        loss = linear(x, weight).sum() + (x @ weight.t()).sum() + few.exp().sum()
    assert store.buffers.num_bytes == 0
    after_f, after_d, _ = round_trip(store)
    assert after_f == after_d == BYTES + 12
    loss.backward()


def test_a_storage_that_something_else_uses_stays_on_the_device():
    store, x = OffloadStore(ThreadLink()), data()
    with store.forward(0, 0):
        y = x.exp()
    address = y.data_ptr()
    assert round_trip(store) == (BYTES, BYTES, BYTES)
    y.sum().backward()
    assert y.data_ptr() == address


def test_what_autograd_gives_up_within_f_is_not_copied():
    store, x = OffloadStore(ThreadLink()), data()
    with store.forward(0, 0):
        torch.nn.functional.dropout(x, 0.5).exp().detach()
    assert store.device_bytes(0, 0) == 0
    assert store.buffers.num_bytes == 0


def test_a_storage_that_f_empties_for_b_to_fill_again_is_not_copied():
    """Selective recomputation does so with tensors that autograd has saved."""
    store, x = OffloadStore(ThreadLink()), data()
    with store.forward(0, 0, [x]):
        y = x.tanh()
        output = y.sin().cos()  # saves `y` and its sine
        y.untyped_storage().resize_(0)
    after_f, after_d, after_h = round_trip(store)
    assert (after_f, after_d, after_h) == (BYTES, 0, BYTES)
    y.untyped_storage().resize_(BYTES)
    y.untyped_storage().copy_(x.detach().tanh().untyped_storage())
    output.backward(torch.ones_like(output))
    again = data()
    again.tanh().sin().cos().backward(torch.ones_like(output))
    assert torch.equal(x.grad, again.grad)


def test_microbatches_share_host_memory_one_after_the_other():
    store = OffloadStore(ThreadLink())
    for microbatch in range(3):
        x = data()
        with store.forward(0, microbatch):
            loss = x.exp().sum()
        store.wait(0, microbatch)
        store.release(0, microbatch)
        store.bring_back(0, microbatch)
        store.wait(0, microbatch)
        loss.backward()
        store.forget(0, microbatch)
        assert torch.equal(x.grad, x.detach().exp())
    assert store.buffers.num_bytes == BYTES
    assert [len(store.times(kind, 0)) for kind in (OpKind.D, OpKind.H)] == [3, 3]


def test_a_backward_before_its_copy_back_is_an_error():
    store, x = OffloadStore(ThreadLink()), data()
    with store.forward(0, 0):
        loss = x.exp().sum()
    store.wait(0, 0)
    store.release(0, 0)
    with pytest.raises(AssertionError, match="before its activations were copied back"):
        loss.backward()


def test_what_is_forgotten_leaves_its_host_memory_for_others():
    store = OffloadStore(ThreadLink())
    for _ in range(2):
        with store.forward(0, 0):
            data().exp()
        kept = data()
        with store.forward(0, 1):
            loss = kept.exp()
        store.clear()
        assert store.left() == []
        del loss
    assert store.buffers.num_bytes <= 2 * BYTES
