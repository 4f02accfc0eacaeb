from __future__ import annotations

import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch

from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


class Tensor:
    """Stands in for what a W holds on to; plain objects have no weak references."""


def backward(store: WeightGradStore, microbatch: int, *weight_grads, chunk: int = 0) -> None:
    """Do what the executor and the layers do in one B."""
    with store.deferring():
        for weight_grad in weight_grads:
            store.put(weight_grad)
    store.flush(chunk, microbatch)


@pytest.fixture
def ran() -> list[str]:
    return []


def test_a_new_store_is_empty_and_has_one_chunk():
    store = WeightGradStore()
    assert (store.num_chunks, store.pending(), store.is_deferring) == (1, [], False)


def test_pop_runs_one_microbatch_in_the_order_of_put(ran):
    store = WeightGradStore()
    backward(store, 0, partial(ran.append, "last layer"), partial(ran.append, "first layer"))
    backward(store, 1, partial(ran.append, "next microbatch"))
    assert ran == [], "nothing runs before its pop"
    store.pop(0, 0)
    assert ran == ["last layer", "first layer"]
    store.pop(0, 1)
    assert ran[2:] == ["next microbatch"]
    assert store.pending() == []


def test_pop_by_parameter_runs_all_microbatches_of_one_parameter_before_the_next(ran):
    store = WeightGradStore()
    for microbatch in (4, 5, 6):
        with store.deferring():
            # The embedding's weight is the output layer's too: its gradients must keep their order.
            for parameter in ("shared", "mlp", "shared"):
                store.put(partial(ran.append, f"{parameter} {microbatch}"), parameter=parameter)
        store.flush(0, microbatch)
    store.pop_by_parameter(0, [4, 5], lambda microbatch: ran.append(f"before {microbatch}"))
    assert ran[1::2] == ["shared 4", "shared 4", "shared 5", "shared 5", "mlp 4", "mlp 5"]
    assert ran[0::2] == ["before 4", "before 4", "before 5", "before 5", "before 4", "before 5"]
    assert store.pending() == [(0, 6)]


def test_each_w_is_started_before_the_one_before_it_runs(ran):
    """The exchange with other ranks that a W waits for then runs beside the W before it."""
    store = WeightGradStore()
    for microbatch in (0, 1, 2):
        with store.deferring():
            for layer in ("last", "first"):
                name = f"{layer} {microbatch}"
                run, start = partial(ran.append, f"run {name}"), partial(ran.append, f"start {name}")
                store.put(run, parameter=layer, start=start)
        store.flush(0, microbatch)
    store.pop(0, 0)
    assert ran == ["start last 0", "start first 0", "run last 0", "run first 0"]
    ran.clear()
    store.pop_by_parameter(0, [1, 2], lambda microbatch: None)
    order = ["last 1", "last 2", "first 1", "first 2"]
    expected = [f"start {order[0]}"]
    for now, after in pairwise(order):
        expected += [f"start {after}", f"run {now}"]
    assert ran == [*expected, f"run {order[-1]}"]


def test_w_of_unknown_parameters_are_not_reordered(ran):
    store = WeightGradStore()
    for microbatch in (0, 1):
        backward(store, microbatch, *(partial(ran.append, f"{layer} {microbatch}") for layer in ("last", "first")))
    store.pop_by_parameter(0, [0, 1], lambda microbatch: None)
    assert ran == ["last 0", "first 0", "last 1", "first 1"]


def test_each_chunk_is_a_queue_of_its_own(ran):
    store = WeightGradStore(num_chunks=2)
    for chunk, microbatch in ((1, 0), (0, 0), (1, 1)):
        backward(store, microbatch, partial(ran.append, f"W{microbatch}.{chunk}"), chunk=chunk)
    assert store.pending() == [(0, 0), (1, 0), (1, 1)]
    for chunk, microbatch in ((1, 0), (1, 1), (0, 0)):
        store.pop(chunk, microbatch)
    assert ran == ["W0.1", "W1.1", "W0.0"]


def test_a_b_without_linear_layers_still_has_its_w():
    """The schedule has a W for every stage, and that of a stage with only an embedding has nothing to do."""
    store = WeightGradStore()
    backward(store, 0)
    assert store.pending() == [(0, 0)]
    store.pop(0, 0)
    assert store.pending() == []


def test_it_defers_only_during_a_b():
    store = WeightGradStore()
    with store.deferring():
        assert store.is_deferring
    assert not store.is_deferring
    with pytest.raises(ZeroDivisionError), store.deferring():
        raise ZeroDivisionError
    assert not store.is_deferring, "also after an error"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.put(print), "outside of deferring"),
        (lambda store: store.pop(0, 0), "W of microbatch 0, chunk 0: nothing is pending"),
        (lambda store: store.pop(1, 3), "W of microbatch 3, chunk 1: the oldest pending is 2"),
        (lambda store: store.pop_by_parameter(1, [3], print), "W of microbatch 3, chunk 1: the oldest pending is 2"),
    ],
)
def test_a_broken_protocol_is_refused(call, message):
    store = WeightGradStore(num_chunks=2)
    backward(store, 2, chunk=1)
    with pytest.raises(AssertionError, match=message):
        call(store)
    assert store.pending() == [(1, 2)], "and nothing is lost"


def test_a_b_inside_a_b_is_refused():
    store = WeightGradStore()
    with store.deferring(), pytest.raises(AssertionError, match="a B inside a B"), store.deferring():
        pass


def test_what_a_w_holds_lives_until_it_has_run():
    """Each layer's input and output gradient are released when that layer is done, not with the bundle."""
    store = WeightGradStore()
    last, first = Tensor(), Tensor()
    alive = [weakref.ref(last), weakref.ref(first)]
    seen = []

    def weight_grad(tensor: Tensor) -> None:
        seen.append([reference() is not None for reference in alive])

    backward(store, 0, partial(weight_grad, last), partial(weight_grad, first))
    del last, first
    assert all(reference() is not None for reference in alive)
    store.pop(0, 0)
    assert seen == [[True, True], [False, True]]
    assert not any(reference() is not None for reference in alive)


def test_by_parameter_too_a_w_is_released_when_it_has_run():
    store = WeightGradStore()
    tensors = {name: Tensor() for name in ("last 0", "first 0", "last 1", "first 1")}
    alive = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    seen = []

    def weight_grad(tensor: Tensor) -> None:
        seen.append(" ".join(name.replace(" ", "") for name, reference in alive.items() if reference() is not None))

    for microbatch in (0, 1):
        with store.deferring():
            for layer in ("last", "first"):
                store.put(partial(weight_grad, tensors.pop(f"{layer} {microbatch}")), parameter=layer)
        store.flush(0, microbatch)
    store.pop_by_parameter(0, [0, 1], lambda microbatch: None)
    assert seen == ["last0 first0 last1 first1", "first0 last1 first1", "first0 first1", "first1"]
    assert all(reference() is None for reference in alive.values())


def test_flush_tells_what_the_w_holds_each_storage_once():
    store = WeightGradStore()
    activation, gradient = torch.zeros(6), torch.zeros(2, dtype=torch.bfloat16)
    with store.deferring():
        store.put(list, held=(activation, gradient))
        store.put(list, held=(activation[2:], activation.view(2, 3)))  # two layers with one input: q, k and v
    store.flush(0, 0)
    assert store.flushed_bytes == 6 * 4 + 2 * 2
    backward(store, 1, list)
    assert store.flushed_bytes == 0, "of the last flush alone"


def test_clear_forgets_without_running(ran):
    store = WeightGradStore(num_chunks=2)
    held = Tensor()
    alive = weakref.ref(held)
    backward(store, 0, partial(ran.append, held), chunk=1)
    with store.deferring():
        store.put(partial(ran.append, held))  # a B that an error cut short
    del held
    store.clear()
    assert (ran, store.pending(), alive()) == ([], [], None)
    backward(store, 0)
    store.pop(0, 0)
    assert ran == [], "what was put before clear() is in no later bundle"
