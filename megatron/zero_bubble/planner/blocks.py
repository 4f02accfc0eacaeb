"""Orders of F and B for V-shaped placements: repeated building blocks (arXiv 2405.15362), and the order of ZB-V.

A building block is the path of one microbatch through the ranks in four legs: the F of chunk 0 from the first rank to
the last, the F of chunk 1 back to the first rank, the B of chunk 1 to the last rank, and the B of chunk 0 back to the
first rank. The more time a leg takes from one rank to the next, the longer activations stay in memory.
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
"""Number of time slots of a building block on one rank: F, B and W of both chunks take one slot each."""
SHARES = (2 / 3, 0.5, 1.0, 0.75)
"""Fractions to try: the time of a chunk's leg from the first rank to the last, divided by the time of both its legs."""
DELAYS = (0, 0, 1, 2, 3)
"""Delays of B, in time slots; a random building block draws one of these delays for each chunk."""
VARIATION = 0.06
"""Standard deviation of a random change of a time in a building block, as a fraction of the block's period."""


class Block(NamedTuple):
    """A building block: the times at which ranks run the operations of one microbatch; a block repeats every period."""

    period: float
    legs: tuple[float, ...]
    """Time from one rank to the next on each leg: F of chunk 0, F of chunk 1, B of chunk 1, B of chunk 0."""
    turns: tuple[float, ...]
    """Time from the start of the last operation of a leg to the start of the next leg, for all `legs` but the last."""

    def varied(self, generator: Random) -> Block:
        """Return a copy of the block with random changes of one, two or three of its durations."""
        times = [self.period, *self.legs, *self.turns]
        for index in generator.sample(range(len(times)), generator.choice((1, 1, 2, 3))):
            times[index] = max(0.0, times[index] + generator.gauss(0, VARIATION * self.period))
        return Block(times[0], tuple(times[1:5]), tuple(times[5:]))


def published_blocks(problem: Problem, in_flight: float) -> Iterator[Block]:
    """Yield the building blocks of arXiv 2405.15362 for `in_flight` microbatches in flight on every rank."""
    # Let h be the time of the leg down and the leg up together, from one rank to the next. The activations of both
    # chunks, each of M_B / 2, are then in memory for 2 p h in sum, and a rank has p h / period microbatches in flight.
    # One more microbatch is in flight because blocks do not start and end in the same slot. With the published delays F
    # and B of a block take different slots, for legs of one slot and of two slots.
    p = problem.num_ranks
    delays = {0.5: (2 if p % 3 == 0 else 0, 0), 2 / 3: (3 if p % 2 == 0 else 0, 1)}
    for share in SHARES:
        for f, b, period in ((1.0, 1.0, float(PERIOD)), _median_times(problem)):
            yield _block(problem, (f, b, period), in_flight, share, delays.get(share, (0, 0)))


def random_block(problem: Problem, in_flight: float, generator: Random) -> Block:
    """Return a random block for at most `in_flight` microbatches in flight on every rank."""
    f, b, period = _median_times(problem)
    times = f, b, period * generator.uniform(1, 1.3)
    delays = generator.choice(DELAYS), generator.choice(DELAYS)
    return _block(problem, times, in_flight * generator.uniform(0.7, 1), generator.uniform(0.1, 0.9), delays)


def _block(
    problem: Problem, times: tuple[float, float, float], in_flight: float, share: float, delays: tuple[int, int]
) -> Block:
    """Return the block for `times` (F, B, period), and for `delays` (of chunk 1's B, of chunk 0's B) in time slots."""
    f, b, period = times
    together = period * (in_flight - 1) / problem.num_ranks
    down, down_again = max(f, together * share), max(b, together * share)
    legs = (down, max(f, together - down_again), down_again, max(b, together - down))
    loss, turn = (delay * period / PERIOD for delay in delays)
    return Block(period, legs, (f, f + loss + problem.delay, b + turn))


def _median_times(problem: Problem) -> tuple[float, float, float]:
    """Return three typical times: F plus a message, B plus a message, and the period of a building block."""
    size, comm = problem.num_stages, median(problem.message or (0,))
    kinds = [slice(kind * size, (kind + 1) * size) for kind in range(3)]
    f, b = (median(problem.latency[kind]) + comm for kind in kinds[:2])
    if problem.recompute is Recompute.FULL:
        kinds.append(slice(problem.codes.r, problem.codes.drop))
    shard_time = sum(problem.duration[first] for first in problem.codes.on_shards)
    return f, b, 2 * sum(median(problem.duration[kind]) for kind in kinds) + shard_time


def repeated(problem: Problem, block: Block) -> list[Order]:
    """Repeat a building block every period; return the F and B of each rank in the order of their start times."""
    p, size = problem.num_ranks, problem.num_stages
    leg_starts = [0.0]
    for leg, turn in zip(block.legs, block.turns, strict=False):
        leg_starts.append(leg_starts[-1] + (p - 1) * leg + turn)
    orders = []
    for rank in range(p):
        first, last = problem.stages_of[rank]
        hops = (rank, p - 1 - rank) * 2
        starts = [start + leg * hop for start, leg, hop in zip(leg_starts, block.legs, hops, strict=True)]
        own = list(zip(starts, (first, last, size + last, size + first), strict=True))
        times = [(start + block.period * k, code) for k in range(problem.num_microbatches) for start, code in own]
        orders.append([code for _, code in sorted(times)])
    return orders


def eager_orders(problem: Problem) -> list[Order]:
    """The orders of ZB-V: each rank runs a warmup of three phases, and then F and B in turn.

    In the warmup, a rank runs F of chunk 0 until the first F of chunk 1 is ready, then F of both chunks until the first
    B is ready, then F and B of chunk 1 until the first B of chunk 0 is ready. The lengths of the phases are such that
    no rank idles if every operation takes the same time.
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
