"""Orders of F and B for a V: a building block repeated (arXiv 2405.15362), and ZB-V's.

In a block one microbatch goes down the ranks, back up, down with its gradient and up again; how long it rests at each
rank of each of these four legs sets the life span of its activations, and so the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule.recomputation import Recompute

PERIOD = 6
"""Slots of a block on one rank, where F, B and W of a chunk take one each."""
SHARES = (2 / 3, 0.5, 1.0, 0.75)
"""Shares of the slots that go to a leg down; the rest goes to the leg up that ends the same life span."""


def repeated_blocks(problem: Problem, held: float) -> Iterator[list[Order]]:
    """Orders that repeat a block in which every rank holds so many microbatches."""
    # A microbatch that rests for h at a rank, on its way down and back up together, is held for 2 p h over
    # both chunks, each half of M_B: p h / period microbatches. Blocks begin and end off the beat, which
    # takes the room of one more.
    # The published delays keep F and B of a block off each other's slots, for legs of one slot and of two.
    p = problem.num_ranks
    delays = {0.5: (2 if p % 3 == 0 else 0, 0), 2 / 3: (3 if p % 2 == 0 else 0, 1)}
    for share in SHARES:
        for block in (_Block(1, 1, PERIOD), _Block.of(problem)):
            together = block.period * (held - 1) / p
            down, down_again = max(block.f, together * share), max(block.b, together * share)
            rest = (down, max(block.f, together - down_again), down_again, max(block.b, together - down))
            yield _repeated(problem, block, rest, delays.get(share, (0, 0)))


@dataclass(frozen=True)
class _Block:
    """Times of an F and a B of one chunk with a message, and the period of a block."""

    f: float
    b: float
    period: float

    @classmethod
    def of(cls, problem: Problem) -> _Block:
        """The block at the median costs of the stages."""
        size, comm = problem.num_stages, median(problem.message or (0,))
        kinds = [slice(kind * size, (kind + 1) * size) for kind in range(3)]
        f, b = (median(problem.latency[kind]) + comm for kind in kinds[:2])
        if problem.recompute is Recompute.FULL:
            kinds.append(slice(problem.codes.r, problem.codes.drop))
        of_shard = sum(problem.duration[first] for first in problem.codes[5:-1])
        return cls(f, b, 2 * sum(median(problem.duration[kind]) for kind in kinds) + of_shard)


def _repeated(
    problem: Problem, block: _Block, rest: tuple[float, float, float, float], delays: tuple[int, int]
) -> list[Order]:
    """F and B by the time at which the repeated block has them.

    `rest` is the time from a rank to the next on the four legs: F of chunk 0, F of chunk 1, B of chunk
    1, B of chunk 0; `delays` are the slots that B of chunk 1 and then B of chunk 0 begin later.
    """
    p, size = problem.num_ranks, problem.num_stages
    down, up, down_again, up_again = rest
    turn = (p - 1) * down + block.f
    slot = block.period / PERIOD
    loss = turn + (p - 1) * up + block.f + delays[0] * slot + problem.delay
    turn_back = loss + (p - 1) * down_again + block.b + delays[1] * slot
    orders = []
    for rank in range(p):
        first, last = problem.stages_of[rank]
        starts = (
            (rank * down, first),
            (turn + (p - 1 - rank) * up, last),
            (loss + rank * down_again, size + last),
            (turn_back + (p - 1 - rank) * up_again, size + first),
        )
        times = [(start + block.period * k, code) for k in range(problem.num_microbatches) for start, code in starts]
        orders.append([code for _, code in sorted(times)])
    return orders


def eager_orders(problem: Problem) -> list[Order]:
    """ZB-V: every rank runs what arrives, F of chunk 0 until the first F of chunk 1 comes back, and so on.

    With unit slots the first microbatch comes to chunk 1 of rank r after 2(p - r) - 1 slots there, its
    gradient 2r slots later, and back to chunk 0 after 2(p - r) more: with as many operations each phase is full.
    """
    p, size, m = problem.num_ranks, problem.num_stages, problem.num_microbatches
    orders = []
    for rank in range(p):
        first, last = problem.stages_of[rank]
        phases = [first] * (2 * (p - rank) - 1) + [last, first] * rank + [last, size + last] * (p - rank)
        order = _Order(m)
        for code in phases:
            order.add(code)
        while len(order.codes) < 4 * m:
            for code, needed in ((first, first), (size + first, size + last), (last, first), (size + last, last)):
                if code == needed or order.count(code) < order.count(needed):
                    order.add(code)
        orders.append(order.codes)
    return orders


class _Order:
    """Collects an order in which no operation comes more often than there are microbatches."""

    def __init__(self, num_microbatches: int) -> None:
        self.codes: Order = []
        self._left: dict[int, int] = {}
        self._num_microbatches = num_microbatches

    def count(self, code: int) -> int:
        return self._num_microbatches - self._left.get(code, self._num_microbatches)

    def add(self, code: int) -> None:
        """Append `code`, unless the order holds all of its microbatches."""
        left = self._left.get(code, self._num_microbatches)
        if left > 0:
            self._left[code] = left - 1
            self.codes.append(code)
