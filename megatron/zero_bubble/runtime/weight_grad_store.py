"""Holds the computations of weight gradients (W) that B has deferred, until the schedule runs these computations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

WeightGrad = Callable[[], None]
"""Function that adds one layer's weight gradient for one microbatch to the gradient of the layer's parameter."""


class _Deferred(NamedTuple):
    """The deferred computation (W) of one layer's weight gradient for one microbatch."""

    parameter: Hashable
    start: Callable[[], None]
    run: WeightGrad
    held: dict[int, int]
    """Identifier of each storage that the weight gradient keeps alive -> bytes of this storage."""


_Bundle = list[_Deferred]
"""The W of all layers of a chunk for one microbatch, in the order in which B runs the layers."""


class WeightGradStore:
    """Deferred weight gradients of one pipeline rank: one first-in-first-out queue per model chunk.

    While a B runs inside the context `deferring()`, each layer passes the computation of its weight gradient to `put`.
    `flush` queues the collected weight gradients as the W of a microbatch. `pop` runs the oldest W of a chunk.
    `pop_by_parameter` runs several W, and computes all weight gradients of one parameter before it starts with
    the next parameter. Outside of `deferring()`, a layer computes its weight gradient within the backward.
    """

    def __init__(self, num_chunks: int = 1) -> None:
        self._queues: list[deque[tuple[int, _Bundle]]] = [deque() for _ in range(num_chunks)]
        self._bundle: _Bundle = []
        self.is_deferring = False
        """Whether layers must pass their weight gradients to `put` instead of computing the weight gradients."""
        self.num_flushed = 0
        """Number of calls of `flush` and `clear` so far; constant during the B of one microbatch."""
        self.flushed_bytes = 0
        """Bytes of the tensors that the last flushed W holds; each storage counts once."""

    @property
    def num_chunks(self) -> int:
        return len(self._queues)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer weight gradients inside the `with` block, which runs one B."""
        assert not self.is_deferring, "a B inside a B"
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def defers(self, weight: torch.Tensor) -> bool:
        """Tell whether the running backward is a B that adds up the gradient of the leaf tensor `weight`.

        A `torch.autograd.grad` that a hook or function of the model calls inside a B adds up no gradients.
        """
        if not self.is_deferring:
            return False
        try:
            return torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
        except RuntimeError:  # `torch.autograd.grad` returns the gradient of `weight`
            return False

    def put(
        self,
        weight_grad: WeightGrad,
        held: Sequence[torch.Tensor] = (),
        parameter: Hashable = None,
        start: Callable[[], None] = lambda: None,
    ) -> None:
        """Defer one layer's weight gradient.

        Args:
            weight_grad: computes the gradient.
            held: the tensors that `weight_grad` keeps alive until `weight_grad` has run.
            parameter: identifies the parameter to which the weight gradient belongs. The weight gradients of one
                parameter are computed in the order of the calls of `put`.
            start: starts background work for which `weight_grad` waits; called before the preceding weight gradient is
                computed.
        """
        assert self.is_deferring, "put() outside of deferring()"
        storages = [tensor.untyped_storage() for tensor in held]
        bytes_of = {storage._cdata: storage.nbytes() for storage in storages}
        self._bundle.append(_Deferred(parameter, start, weight_grad, bytes_of))

    def flush(self, chunk: int, microbatch: int) -> None:
        """Queue the weight gradients that `put` has collected since the last `flush`, as the W of `microbatch`."""
        self._queues[chunk].append((microbatch, self._bundle))
        self.flushed_bytes = self.bytes_since(0)
        self._start_bundle()

    @property
    def num_put(self) -> int:
        """Number of weight gradients that the current B has deferred and that have not been computed."""
        return len(self._bundle)

    def run_since(self, num_put: int) -> None:
        """Compute the weight gradients that the current B has deferred, except the first `num_put` of them."""
        pending, self._bundle = self._bundle[num_put:], self._bundle[:num_put]
        _run_in_order([(0, deferred) for deferred in pending], lambda microbatch: None)

    def bytes_since(self, num_put: int) -> int:
        """Return the bytes held by the weight gradients that the current B has deferred after the first `num_put`."""
        deferred = self._bundle[num_put:]
        return sum({cdata: size for gradient in deferred for cdata, size in gradient.held.items()}.values())

    def _start_bundle(self) -> None:
        self.num_flushed += 1
        self._bundle = []

    def pop(self, chunk: int, microbatch: int) -> None:
        """Run the oldest pending W of `chunk`, which must be the W of `microbatch`, and release this W's tensors."""
        # W runs in the order of B, from the last layer to the first, as autograd would run it.
        _run_in_order([(microbatch, deferred) for deferred in self._take(chunk, microbatch)], lambda microbatch: None)

    def pop_by_parameter(self, chunk: int, microbatches: Sequence[int], before: Callable[[int], None]) -> None:
        """Run the W of `microbatches`, which must be the oldest W of `chunk`, parameter by parameter.

        The order of the parameters is the order in which B reaches the parameters, from the last layer to the first.
        The weight gradients of one parameter are computed in the order of `microbatches`. Before each weight gradient
        is computed, `before` is called with the number of the microbatch.
        """
        _run_in_order(self._take_by_parameter(chunk, microbatches), before)

    def _take_by_parameter(self, chunk: int, microbatches: Sequence[int]) -> list[tuple[int, _Deferred]]:
        """Remove the W of `microbatches` from the queue; return the deferred weight gradients, ordered by parameter."""
        by_parameter: dict[Hashable, list[tuple[int, _Deferred]]] = {}
        for microbatch in microbatches:
            for deferred in self._take(chunk, microbatch):
                by_parameter.setdefault(deferred.parameter, []).append((microbatch, deferred))
        return [entry for entries in by_parameter.values() for entry in entries]

    def _take(self, chunk: int, microbatch: int) -> _Bundle:
        assert self._queues[chunk], f"W of microbatch {microbatch}, chunk {chunk}: nothing is pending"
        oldest, bundle = self._queues[chunk][0]
        assert oldest == microbatch, f"W of microbatch {microbatch}, chunk {chunk}: the oldest pending is {oldest}"
        self._queues[chunk].popleft()
        return bundle

    def pending(self) -> list[tuple[int, int]]:
        """Return (chunk, microbatch) of every W that has not run, oldest first within a chunk."""
        return [(chunk, microbatch) for chunk, bundles in enumerate(self._queues) for microbatch, _ in bundles]

    def clear(self) -> None:
        """Discard all pending W."""
        for bundles in self._queues:
            bundles.clear()
        self._start_bundle()


def _run_in_order(pending: list[tuple[int, _Deferred]], before: Callable[[int], None]) -> None:
    """Compute deferred weight gradients in order.

    The function `start` of a weight gradient is called before the preceding weight gradient is computed.
    """
    pending.reverse()
    if pending:
        pending[-1][1].start()
    while pending:
        microbatch, deferred = pending.pop()
        if pending:
            pending[-1][1].start()
        before(microbatch)
        deferred.run()
