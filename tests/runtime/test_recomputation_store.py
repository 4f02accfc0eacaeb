"""The store of dropped blocks: what F hands over R runs, once, in the order of the forward."""

from __future__ import annotations

import gc
import weakref

import pytest

from megatron.zero_bubble.runtime.recomputation_store import ForwardMode, RecomputationStore


def test_r_runs_what_f_dropped_in_the_order_of_the_forward():
    store, ran = RecomputationStore(), []
    for microbatch in (0, 1):
        with store.forward(0, microbatch, drops=True):
            assert store.current.mode is ForwardMode.DROP
            for block in (0, 1):
                store.current.put(lambda microbatch=microbatch, block=block: ran.append((microbatch, block)))
    assert store.current is None
    assert store.dropped() == [(0, 0), (0, 1)]
    store.recompute(0, 1)
    store.recompute(0, 0)
    assert ran == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert store.dropped() == []


def test_an_f_without_r_keeps_and_hands_nothing_over():
    store = RecomputationStore()
    with store.forward(0, 0, drops=False):
        assert store.current.mode is ForwardMode.KEEP
        with pytest.raises(AssertionError, match="in an F that keeps"):
            store.current.put(lambda: None)
    assert store.dropped() == []


def test_blocks_inside_a_block_are_left_alone():
    store = RecomputationStore()
    with store.forward(1, 0, drops=True):
        with store.suspended():
            assert store.current is None
        assert store.current.mode is ForwardMode.DROP


@pytest.mark.parametrize("drops", [True, False], ids=["R", "groups"])
def test_what_is_forgotten_is_freed_without_the_garbage_collector(drops: bool) -> None:
    """A block's graph refers to its recomputation, which refers to the graph; `--manual-gc` collects no such circle."""

    class Graph:
        pass

    store, graph = RecomputationStore(), Graph()
    with store.forward(0, 0, drops=drops, num_groups=2):
        graph.backward = store.current.put(lambda graph=graph: None)
    lives = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        store.clear()
        assert lives() is None
    finally:
        gc.enable()


def test_what_is_forgotten_is_never_run():
    store = RecomputationStore()
    with store.forward(0, 3, drops=True):
        store.current.put(pytest.fail)
    store.clear()
    assert store.dropped() == []
