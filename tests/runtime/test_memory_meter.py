"""On a CPU memory is what autograd saves in F and what the store holds for W: exact, each storage once."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.nn.functional import linear

from megatron.zero_bubble.runtime.memory_meter import CudaMeter, SavedTensorMeter, memory_meter
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind

F, B, W, BW, R = OpKind.F, OpKind.B, OpKind.W, OpKind.BW, OpKind.R
BATCH, WIDTH = 5, 8
FLOAT = 4


def held_by(forward) -> int:
    """The bytes that F of microbatch 0 leaves behind, as the meter measures them."""
    meter = SavedTensorMeter(WeightGradStore())
    meter.begin(Op(F, 0))
    output = forward()
    held = meter.end(Op(F, 0))
    del output
    return held


def test_a_failed_operation_leaves_no_hooks():
    """Autograd hands other objects than the saved tensors to every later backward while the meter's hooks are set."""
    with closing(SavedTensorMeter(WeightGradStore())) as meter:
        meter.begin(Op(F, 0))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def data(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, requires_grad=requires_grad)


def test_what_autograd_saves_is_counted_in_bytes():
    x = data()
    assert held_by(lambda: x.exp()) == BATCH * WIDTH * FLOAT  # its output
    assert (
        held_by(lambda: x * x.detach().clone()) == BATCH * WIDTH * FLOAT
    )  # the factor with a gradient needs the other
    assert held_by(lambda: x + 1.0) == 0


def test_a_storage_counts_once_however_often_it_is_saved():
    x = data()
    assert held_by(lambda: x * x) == BATCH * WIDTH * FLOAT
    assert held_by(lambda: (x.square(), x.view(-1).square(), x[:2].square())) == BATCH * WIDTH * FLOAT


def test_parameters_and_their_views_do_not_count():
    """A linear layer keeps its input; that its transposed weight is a view must not hide whose it is."""
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    x = data()
    for forward in (lambda: linear(x, weight), lambda: x @ weight.t(), lambda: x * weight[0]):
        assert held_by(forward) == BATCH * WIDTH * FLOAT


def test_what_is_saved_and_given_up_within_the_operation_does_not_count():
    """Dropped blocks do so: dropout saves its mask even where no gradient is recorded."""
    x = data()
    assert held_by(lambda: (x * torch.randn(BATCH, WIDTH)).detach()) == 0


def test_nothing_is_counted_after_f():
    meter = SavedTensorMeter(WeightGradStore())
    x = data()
    meter.begin(Op(F, 0))
    meter.end(Op(F, 0))
    x.exp()
    meter.begin(Op(F, 1))
    assert meter.end(Op(F, 1)) == 0


def test_the_gradients_are_those_without_a_meter():
    x = data()
    expected = torch.autograd.grad((x.exp() * x).sum(), x)[0]
    meter = SavedTensorMeter(WeightGradStore())
    meter.begin(Op(F, 0))
    loss = (x.exp() * x).sum()
    meter.end(Op(F, 0))
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def run_f(meter: SavedTensorMeter, op: Op) -> int:
    x = data()
    meter.begin(op)
    x.exp()
    return meter.end(op)


def run_b(meter: SavedTensorMeter, store: WeightGradStore, op: Op, *held: torch.Tensor) -> int:
    meter.begin(op)
    with store.deferring():
        store.put(lambda: None, held)
    store.flush(op.chunk, op.microbatch)
    return meter.end(op)


def run_w(meter: SavedTensorMeter, store: WeightGradStore, op: Op) -> int:
    meter.begin(op)
    store.pop(op.chunk, op.microbatch)
    return meter.end(op)


def test_b_releases_all_but_what_w_needs_and_w_releases_that():
    store = WeightGradStore()
    meter = SavedTensorMeter(store)
    held = run_f(meter, Op(F, 0))
    kept = torch.empty(10)
    after_b = run_b(meter, store, Op(B, 0), kept, kept[:5])
    assert after_b == 10 * FLOAT - held
    assert run_w(meter, store, Op(W, 0)) == -10 * FLOAT


def test_a_fused_backward_releases_everything():
    meter = SavedTensorMeter(WeightGradStore())
    held = run_f(meter, Op(F, 0))
    meter.begin(Op(BW, 0))
    assert meter.end(Op(BW, 0)) == -held


def test_r_adds_what_f_has_dropped_and_b_releases_both():
    """F keeps the block's input, which R saves again: a storage counts once for both."""
    store = WeightGradStore()
    meter = SavedTensorMeter(store)
    x = data()
    run_f(meter, Op(F, 1))
    meter.begin(Op(F, 0))
    outputs = [x.square()]
    kept = meter.end(Op(F, 0))
    meter.begin(Op(R, 0))
    outputs.append(x.square().exp())
    restored = meter.end(Op(R, 0))
    assert (kept, restored) == (BATCH * WIDTH * FLOAT, BATCH * WIDTH * FLOAT)
    assert run_b(meter, store, Op(B, 0), torch.empty(3)) == 3 * FLOAT - kept - restored
    assert run_w(meter, store, Op(W, 0)) == -3 * FLOAT


def test_microbatches_and_chunks_are_kept_apart():
    store = WeightGradStore(num_chunks=2)
    meter = SavedTensorMeter(store)
    changes = {}
    for microbatch, chunk in ((0, 0), (1, 0), (0, 1)):
        changes[microbatch, chunk] = run_f(meter, Op(F, microbatch, chunk))
    for number, (microbatch, chunk) in enumerate(changes):
        changes[microbatch, chunk] += run_b(meter, store, Op(B, microbatch, chunk), torch.empty(number + 1))
    for number, (microbatch, chunk) in enumerate(changes):
        assert changes[microbatch, chunk] == (number + 1) * FLOAT
        assert run_w(meter, store, Op(W, microbatch, chunk)) == -(number + 1) * FLOAT


class Allocator:
    """CUDA's: counts what it has given out, and the most of it since it was told to forget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.forget)

    def forget(self) -> None:
        self.most = self.now

    def change(self, *sizes: int) -> None:
        for size in sizes:
            self.now += size
            self.most = max(self.most, self.now)


def test_on_a_gpu_the_most_inside_an_operation_is_measured(monkeypatch):
    """F keeps 30 of the 100 that its logits take; B needs 25 more than it starts with, and W nothing more."""
    allocator, meter = Allocator(monkeypatch), CudaMeter()
    allocator.change(1000, -500)
    found = []
    for kind, sizes in ((F, (30, 100, -100)), (B, (25, -40)), (W, (-15,))):
        meter.begin(Op(kind, 0))
        allocator.change(*sizes)
        found.append((meter.end(Op(kind, 0)), meter.inside))
    assert found == [(30, 100), (-15, 25), (-15, 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks CUDA's allocator")
def test_on_a_gpu_the_allocator_is_asked():
    meter = memory_meter(torch.device("cuda"), WeightGradStore())
    meter.begin(Op(F, 0))
    kept = torch.empty(1024, device="cuda")
    assert meter.end(Op(F, 0)) == kept.numel() * FLOAT
