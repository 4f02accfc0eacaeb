"""Orders of F and B for a V: a building block repeated (arXiv 2405.15362), and ZB-V's.

In a block one microbatch goes down the ranks, back up, down with its gradient and up again; how long it rests at each
rank of each of these four legs sets the life span of its activations, and so the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, cycle
from random import Random
from statistics import median
from typing import NamedTuple

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule.recomputation import Recompute

PERIOD = 6
"""Slots of a block on one rank, where F, B and W of a chunk take one each."""
SHARES = (2 / 3, 0.5, 1.0, 0.75)
"""Shares of the slots that go to a leg down; the rest goes to the leg up that ends the same life span."""
DELAYS = (0, 0, 1, 2, 3)
"""Slots by which a leg of a random block begins later."""
VARIATION = 0.06
"""Standard deviation of a change of a block's times, as a fraction of its period."""


class Block(NamedTuple):
    """When one microbatch runs on each rank; the next microbatches repeat it, a period later each."""

    period: float
    legs: tuple[float, ...]
    """Time from a rank to the next on the four legs: F of chunk 0, F of chunk 1, B of chunk 1, B of chunk 0."""
    turns: tuple[float, ...]
    """Time from the start of the last operation of each leg but the last to the start of the next leg."""

    def varied(self, generator: Random) -> Block:
        """The block with one to three of its times changed at random."""
        times = [self.period, *self.legs, *self.turns]
        for index in generator.sample(range(len(times)), generator.choice((1, 1, 2, 3))):
            times[index] = max(0.0, times[index] + generator.gauss(0, VARIATION * self.period))
        return Block(times[0], tuple(times[1:5]), tuple(times[5:]))


def published_blocks(problem: Problem, held: float) -> Iterator[Block]:
    """Blocks in which every rank holds so many microbatches."""
    # A microbatch that rests for h at a rank, on its way down and back up together, is held for 2 p h over
    # both chunks, each half of M_B: p h / period microbatches. Blocks begin and end off the beat, which
    # takes the room of one more.
    # The published delays keep F and B of a block off each other's slots, for legs of one slot and of two.
    p = problem.num_ranks
    delays = {0.5: (2 if p % 3 == 0 else 0, 0), 2 / 3: (3 if p % 2 == 0 else 0, 1)}
    for share in SHARES:
        for f, b, period in ((1.0, 1.0, float(PERIOD)), _median_times(problem)):
            yield _block(problem, (f, b, period), held, share, delays.get(share, (0, 0)))


def random_block(problem: Problem, held: float, generator: Random) -> Block:
    """A block in which every rank holds at most so many microbatches."""
    f, b, period = _median_times(problem)
    times = f, b, period * generator.uniform(1, 1.3)
    delays = generator.choice(DELAYS), generator.choice(DELAYS)
    return _block(problem, times, held * generator.uniform(0.7, 1), generator.uniform(0.1, 0.9), delays)


def _block(
    problem: Problem, times: tuple[float, float, float], held: float, share: float, delays: tuple[int, int]
) -> Block:
    """The block of such times of F, B and a period, with slots before B of chunk 1 and before B of chunk 0."""
    f, b, period = times
    together = period * (held - 1) / problem.num_ranks
    down, down_again = max(f, together * share), max(b, together * share)
    legs = (down, max(f, together - down_again), down_again, max(b, together - down))
    loss, turn = (delay * period / PERIOD for delay in delays)
    return Block(period, legs, (f, f + loss + problem.delay, b + turn))


def _median_times(problem: Problem) -> tuple[float, float, float]:
    """Times of an F and a B of one chunk with a message, and of a period, at the median costs of the stages."""
    size, comm = problem.num_stages, median(problem.message or (0,))
    kinds = [slice(kind * size, (kind + 1) * size) for kind in range(3)]
    f, b = (median(problem.latency[kind]) + comm for kind in kinds[:2])
    if problem.recompute is Recompute.FULL:
        kinds.append(slice(problem.codes.r, problem.codes.drop))
    of_shard = sum(problem.duration[first] for first in problem.codes[5:-1])
    return f, b, 2 * sum(median(problem.duration[kind]) for kind in kinds) + of_shard


def repeated(problem: Problem, block: Block) -> list[Order]:
    """F and B of every rank by the time at which the repeated block has them."""
    p, size = problem.num_ranks, problem.num_stages
    begins = [0.0]
    for leg, turn in zip(block.legs, block.turns, strict=False):
        begins.append(begins[-1] + (p - 1) * leg + turn)
    orders = []
    for rank in range(p):
        first, last = problem.stages_of[rank]
        hops = (rank, p - 1 - rank) * 2
        starts = [begin + leg * hop for begin, leg, hop in zip(begins, block.legs, hops, strict=True)]
        own = list(zip(starts, (first, last, size + last, size + first), strict=True))
        times = [(start + block.period * k, code) for k in range(problem.num_microbatches) for start, code in own]
        orders.append([code for _, code in sorted(times)])
    return orders


def eager_orders(problem: Problem) -> list[Order]:
    """ZB-V: every rank runs each operation that is ready: F of chunk 0 until the first F of chunk 1, and so on.

    With unit slots the first microbatch comes to chunk 1 of rank r after 2(p - r) - 1 slots there, its
    gradient 2r slots later, and back to chunk 0 after 2(p - r) more: with as many operations each phase is full.
    """
    p, size, m = problem.num_ranks, problem.num_stages, problem.num_microbatches
    orders = []
    for rank in range(p):
        first, last = problem.stages_of[rank]
        phases = [first] * (2 * (p - rank) - 1) + [last, first] * rank + [last, size + last] * (p - rank)
        steady = ((first, first), (size + first, size + last), (last, first), (size + last, last))
        order: Order = []
        counts: Counter[int] = Counter()
        for code, needed in chain(zip(phases, phases, strict=True), cycle(steady)):
            if counts[code] < m and (code == needed or counts[code] < counts[needed]):
                counts[code] += 1
                order.append(code)
            if len(order) == 4 * m:
                break
        orders.append(order)
    return orders
