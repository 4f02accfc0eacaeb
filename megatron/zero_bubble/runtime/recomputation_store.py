"""Holds the blocks of layers whose activations F has dropped, until R or B runs the forward of these blocks again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule.kinds import OpKind

Recomputation = Callable[[], None]
"""Function that repeats the forward of one block of layers under autograd, and keeps the result for the backward."""


class ForwardMode(Enum):
    """Whether a forward keeps or drops the activations of a block of layers."""

    KEEP = "keep"
    """Keep the activations, and pass the block's inputs and outputs to `Blocks.keep`."""
    DROP = "drop"
    """Drop all activations but the block's input, pass the recomputation to `Blocks.put`, and run the block's backward
    in a context from the function that `put` returns."""


class RecomputationStore:
    """Holds the blocks of layers whose activations F has dropped on one pipeline rank, by model chunk and microbatch.

    The executor runs each F of a training step inside the context `forward`; the arguments of `forward` decide whether
    the F drops its activations. The executor runs an R by calling `recompute`. Outside of an F, the store does not
    affect blocks of layers.

    The blocks of layers of a chunk may form several groups. R restores the activations of the chunk's last group of
    blocks. If a microbatch has no R, its F keeps the activations of the last group. B restores the activations of every
    group of blocks but the last, each group right before its own backward. B also computes the weight gradients of all
    groups of blocks except the first, so that the activations of at most one group are in memory at a time.
    """

    def __init__(self) -> None:
        self.weights = WeightGradStore()
        """Store of the blocks' deferred weight gradients; the executor replaces this store with the rank's store."""
        self.num_blocks: dict[int, int] = {}
        """Chunk -> number of blocks in an F; known once an F of the chunk has run."""
        self.bytes_outside: dict[int, int] = {}
        """Chunk -> bytes that layers outside of recomputed blocks keep for W; known once a B of the chunk has run."""
        self.bytes_of_blocks = 0
        """Bytes that are kept for W by the blocks whose backward has run in the current B."""
        self.timed: Callable[[OpKind], AbstractContextManager[Any]] = nullcontext
        """Makes a context manager that measures the time that B spends on a recomputation or on weight gradients."""
        self._dropped: dict[tuple[int, int], Blocks] = {}
        self._alive: WeakSet[Blocks] = WeakSet()
        """The blocks of every F whose activations may still be in memory."""
        self.current: Blocks | None = None
        """The blocks of the F that runs; None outside of an F and inside of `suspended`."""

    @contextmanager
    def forward(self, chunk: int, microbatch: int, *, drops: bool, num_groups: int = 1) -> Iterator[None]:
        """Decide which blocks of layers drop their activations in the F that runs inside the `with` block.

        Args:
            drops: whether the schedule has an R for the microbatch.
            num_groups: number of groups into which the chunk's blocks are divided.
        """
        assert self.current is None, "an F inside an F"
        self.current = blocks = Blocks(self, num_groups, self.num_blocks.get(chunk), has_r=drops)
        self._alive.add(blocks)
        if drops:
            self._dropped[chunk, microbatch] = blocks
        try:
            yield
        finally:
            self.current = None
        self.num_blocks[chunk] = blocks.number

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Disable this store inside the `with` block, which runs a block of layers that is recomputed as a whole."""
        before, self.current = self.current, None
        try:
            yield
        finally:
            self.current = before

    def recompute(self, chunk: int, microbatch: int) -> None:
        """Restore the dropped activations of the last group of blocks, for one microbatch."""
        self._dropped.pop((chunk, microbatch)).restore_group()

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """Count the bytes that layers outside of recomputed blocks keep for W, in the B that the `with` block runs."""
        self.bytes_of_blocks = 0
        yield
        outside = self.weights.flushed_bytes - self.bytes_of_blocks
        self.bytes_outside[chunk] = max(0, min(outside, self.bytes_outside.get(chunk, outside)))

    def dropped(self) -> list[tuple[int, int]]:
        """Return (chunk, microbatch) of every F that has dropped activations and whose R has not run."""
        return list(self._dropped)

    def clear(self) -> None:
        """Remove all blocks from the store without recomputing their activations, and free the blocks' inputs."""
        self._dropped.clear()
        for blocks in self._alive:
            blocks.drop_recomputations()


class Blocks:
    """The blocks of layers that one F runs, in order, and the state of each block."""

    def __init__(self, store: RecomputationStore, num_groups: int, usual_number: int | None, *, has_r: bool) -> None:
        self._store = store
        self._num_groups = num_groups
        self._usual_number = usual_number
        self._has_r = has_r
        self._dropped: dict[int, Recomputation] = {}
        """Index of a block -> its recomputation; an entry is removed when the recomputation runs."""
        self._entered: tuple[int, int] | None = None
        """(index of the block whose backward runs, `num_put` at the start of the backward); None between two blocks."""
        self.number = 0
        """Number of blocks that the F has run so far."""

    def suspended(self) -> AbstractContextManager[None]:
        """See `RecomputationStore.suspended`."""
        return self._store.suspended()

    @property
    def mode(self) -> ForwardMode:
        """Whether the next block keeps or drops its activations."""
        if self._has_r:
            return ForwardMode.DROP
        if self._num_groups == 1:
            return ForwardMode.KEEP
        # Before any F has ended, the blocks of the last group are unknown: all blocks are dropped.
        is_last = self._usual_number is not None and self.number >= self._starts(self._usual_number)[-1]
        return ForwardMode.KEEP if is_last else ForwardMode.DROP

    def put(self, recomputation: Recomputation) -> Callable[[], AbstractContextManager[None]]:
        """Store a block's recomputation, and return a function that makes the context for the block's backward."""
        assert self.mode is ForwardMode.DROP, "put() in an F that keeps its activations"
        number = self.number
        self._dropped[number] = recomputation
        self.number += 1
        return partial(self._backward, number)

    def keep(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Record the inputs and outputs of a block that has kept its activations."""
        assert self.mode is ForwardMode.KEEP, "keep() in an F that drops its activations"
        number = self.number
        self.number += 1
        if self._num_groups > 1:
            # The gradient of a block's output exists before the block's backward starts, and the gradient of the
            # block's input exists after the block's backward has ended.
            _call_with_gradient(outputs, lambda grad: self._enter(number))
            _call_with_gradient(inputs, lambda grad: self._leave(number))

    @contextmanager
    def _backward(self, number: int) -> Iterator[None]:
        if number in self._dropped:
            self._leave_entered()
            needs_r = self._num_groups == 1 or (self._has_r and number >= self._starts(self.number)[-1])
            assert not needs_r, "backward of a block before its R"
            with self._store.timed(OpKind.R):
                self.restore_group()
        self._enter(number)
        yield
        self._leave(number)

    def restore_group(self) -> None:
        """In the last group that has dropped activations, repeat the forward of each dropped block, in order."""
        last = max(self._dropped, default=0)
        first = max(start for start in self._starts(self.number) if start <= last)
        for number in sorted(number for number in self._dropped if number >= first):
            self._dropped.pop(number)()

    def drop_recomputations(self) -> None:
        """Drop the recomputations, which refer to the graph of their F, whose backwards refer to these blocks."""
        self._dropped.clear()

    def _starts(self, number: int) -> list[int]:
        """Return the index of the first block of each group, for a chunk with `number` blocks."""
        groups = max(1, min(self._num_groups, number))
        return [number * group // groups for group in range(groups)]

    def _enter(self, number: int) -> None:
        self._leave_entered()
        self._entered = number, self._store.weights.num_put

    def _leave(self, number: int) -> None:
        if self._entered is not None and self._entered[0] == number:
            self._leave_entered()

    def _leave_entered(self) -> None:
        """Compute the deferred weight gradients of the block whose backward has just ended.

        The weight gradients of the blocks in the chunk's first group of blocks stay deferred.
        """
        if self._entered is None:
            return
        (number, num_put), self._entered = self._entered, None
        weights, starts = self._store.weights, self._starts(self.number)
        if not weights.is_deferring:
            return
        if len(starts) == 1 or number < starts[1]:
            self._store.bytes_of_blocks += weights.bytes_since(num_put)
            return
        with self._store.timed(OpKind.W):
            weights.run_since(num_put)


def _call_with_gradient(tensors: Sequence[Any], function: Callable[[torch.Tensor], None]) -> None:
    """Register `function` as a gradient hook of the first tensor in `tensors` that requires a gradient."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(function)
            return
