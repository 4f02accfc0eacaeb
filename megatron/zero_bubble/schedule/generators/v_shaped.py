"""ZB-V, V-Half and V-Min: two chunks a rank placed in a V, planned from the real costs (arXiv 2405.15362).

The order of F and B is that of a repeated building block, W goes where it costs least. In a block one
microbatch goes down the ranks, back up, down with its gradient and up again; how long it rests at each rank of
each of these four legs sets the life span of its activations, and so the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import add
from statistics import median

from megatron.zero_bubble.schedule.bounds import lower_bounds
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Op, OpKind, Placement, Schedule
from megatron.zero_bubble.schedule.planner.fill import GapRule
from megatron.zero_bubble.schedule.planner.portfolio import Portfolio
from megatron.zero_bubble.schedule.planner.problem import Order, Problem
from megatron.zero_bubble.schedule.simulate import simulate

BUDGET = 600_000
"""Operations to plan in all candidates together."""
LEAST_CANDIDATES = 8
"""Candidates to try however large the schedule is."""
PERIOD = 6
"""Slots of a block on one rank, where F, B and W of a chunk take one each."""
SHARES = (2 / 3, 0.5, 1.0, 0.75)
"""Of the slots that a leg down and the leg up that ends the same life span have together, those of the first."""


def zb_v(
    num_ranks: int, num_microbatches: int, *, costs: StageCosts, memory_limit: Sequence[float] | None = None
) -> Schedule:
    """No bubble where F = B = W, in 1F1B's memory: p M_B on every rank, unless told otherwise."""
    return _planned("zb-v", num_ranks, num_microbatches, costs, memory_limit, num_ranks)


def v_half(
    num_ranks: int, num_microbatches: int, *, costs: StageCosts, memory_limit: Sequence[float] | None = None
) -> Schedule:
    """About half of 1F1B's bubble where F = B = W, in p/2 + 1 M_B on every rank, unless told otherwise."""
    return _planned("v-half", num_ranks, num_microbatches, costs, memory_limit, num_ranks / 2 + 1)


def v_min(
    num_ranks: int, num_microbatches: int, *, costs: StageCosts, memory_limit: Sequence[float] | None = None
) -> Schedule:
    """About two thirds of 1F1B's bubble where F = B = W, in p/3 + 1 M_B on every rank, unless told otherwise."""
    return _planned("v-min", num_ranks, num_microbatches, costs, memory_limit, num_ranks / 3 + 1)


def _planned(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    costs: StageCosts,
    memory_limit: Sequence[float] | None,
    num_held: float,
) -> Schedule:
    """Plan within the limit, which is room for `num_held` microbatches on both chunks by default."""
    placement = Placement("v", num_ranks, 2)
    limits = memory_limit or tuple(
        num_held * _whole(placement, costs, rank) + sum(_added(placement, costs, rank)) for rank in range(num_ranks)
    )
    planned = _within(name, placement, num_microbatches, costs, limits)
    if max(costs.memory_b) <= 0:
        return planned
    # The planner keeps room for what B adds from F on: for few microbatches then, and it may be better not to defer.
    together = _back_to_back(name, placement, num_microbatches, costs, limits)
    return min((planned, together), key=lambda schedule: simulate(schedule, costs).cost) if together else planned


def _within(
    name: str, placement: Placement, num_microbatches: int, costs: StageCosts, limits: Sequence[float]
) -> Schedule:
    problem = Problem.feasible(placement, num_microbatches, costs, limits)
    bound = lower_bounds(placement, num_microbatches, costs, limits).span
    portfolio = Portfolio(bound, max(BUDGET, LEAST_CANDIDATES * problem.num_ops))
    portfolio.in_order(problem, problem.one_by_one())
    for orders in _candidates(problem):
        for rule in (GapRule.BALANCED, GapRule.ALWAYS, GapRule.NEVER):
            if not portfolio.finished:
                portfolio.fill(problem, orders, rule)
    assert portfolio.best is not None, "one microbatch after the other fits in any limit that is feasible"
    return problem.schedule(name, portfolio.best.orders)


def _back_to_back(
    name: str, placement: Placement, num_microbatches: int, costs: StageCosts, limits: Sequence[float]
) -> Schedule | None:
    """Planned as if B and W were one operation; None where that does not fit. Every W follows its B."""
    fused = replace(
        costs,
        time_b=tuple(map(add, costs.time_b, costs.time_w)),
        time_w=tuple(1e-6 * w for w in costs.time_w),  # a cost is above zero
        memory_b=tuple(map(add, costs.memory_b, costs.memory_w)),
        memory_w=(0,) * placement.num_stages,
    )
    rooms = [limit - max(_added(placement, costs, rank)) for rank, limit in enumerate(limits)]
    try:
        schedule = _within(name, placement, num_microbatches, fused, rooms)
    except Infeasible:
        return None
    without_w = ([op for op in lane if op.kind is not OpKind.W] for lane in schedule.ops)
    return replace(schedule, ops=tuple(tuple(chain.from_iterable(map(_and_its_w, lane))) for lane in without_w))


def _and_its_w(op: Op) -> tuple[Op, ...]:
    return (op, op._replace(kind=OpKind.W)) if op.kind is OpKind.B else (op,)


def _whole(placement: Placement, costs: StageCosts, rank: int) -> float:
    """M_B of a rank: what one microbatch holds on both of its chunks."""
    return sum(costs.memory_f[placement.stage_of(rank, chunk)] for chunk in range(placement.num_chunks))


def _added(placement: Placement, costs: StageCosts, rank: int) -> list[float]:
    """Chunk -> what B adds: with activation recomputation a microbatch holds more after its B than before it."""
    return [max(0, costs.memory_b[placement.stage_of(rank, chunk)]) for chunk in range(placement.num_chunks)]


def _candidates(problem: Problem) -> Iterator[list[Order]]:
    """Orders of F and B, the most promising first."""
    p, costs = problem.num_ranks, problem.costs
    held = min(limit / _whole(problem.placement, costs, rank) for rank, limit in enumerate(problem.limits))
    if held >= p:
        yield _eager(problem)
    # A microbatch that rests for h at a rank, on its way down and back up together, is held for 2 p h over
    # both chunks, each half of M_B: p h / period microbatches. Blocks begin and end off the beat, which
    # takes the room of one more.
    # The published delays keep F and B of a block off each other's slots, for legs of one slot and of two.
    delays = {0.5: (2 if p % 3 == 0 else 0, 0), 2 / 3: (3 if p % 2 == 0 else 0, 1)}
    for share in SHARES:
        for block in (_Block(1, 1, PERIOD), _Block.of(costs)):
            together = block.period * (held - 1) / p
            down, down_again = max(block.f, together * share), max(block.b, together * share)
            rest = (down, max(block.f, together - down_again), down_again, max(block.b, together - down))
            yield _repeated(problem, block, rest, delays.get(share, (0, 0)))
    if held < p:
        yield _eager(problem)


@dataclass(frozen=True)
class _Block:
    """What an F and a B of one chunk take, with a message, and after how long a block is repeated."""

    f: float
    b: float
    period: float

    @classmethod
    def of(cls, costs: StageCosts) -> _Block:
        """At the costs of most stages."""
        f, b, w = median(costs.time_f), median(costs.time_b), median(costs.time_w)
        comm = median(costs.time_comm or (0,))
        return cls(f + comm, b + comm, 2 * (f + b + w))


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
    loss = turn + (p - 1) * up + block.f + delays[0] * slot
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


def _eager(problem: Problem) -> list[Order]:
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
    """An order in which no operation comes more often than there are microbatches."""

    def __init__(self, num_microbatches: int) -> None:
        self.codes: Order = []
        self._left: dict[int, int] = {}
        self._num_microbatches = num_microbatches

    def count(self, code: int) -> int:
        return self._num_microbatches - self._left.get(code, self._num_microbatches)

    def add(self, code: int) -> None:
        """Append `code`, unless all of its microbatches are there."""
        left = self._left.get(code, self._num_microbatches)
        if left > 0:
            self._left[code] = left - 1
            self.codes.append(code)
