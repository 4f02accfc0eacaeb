"""ZB-V, V-Half and V-Min: two chunks a rank placed in a V, planned from the real costs (arXiv 2405.15362).

The order of F and B is that of a repeated building block, W goes where it costs least. In a block one
microbatch goes down the ranks, back up, down with its gradient and up again; how long it rests at each rank of
each of these four legs sets the life span of its activations, and so the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from operator import add, le
from statistics import median

from megatron.zero_bubble.schedule.costs import SMALLEST, StageCosts
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.search.event_loop import GapRule, Keeping, PlannedOrders
from megatron.zero_bubble.schedule.search.portfolio import Portfolio, best_of, fits, recomputed_where_needed
from megatron.zero_bubble.schedule.search.problem import Order, Problem

BUDGET = 600_000
"""Operations to plan in all candidates together."""
IMPROVING = 300_000
"""Operations to plan while the best candidates are improved."""
LEAST_CANDIDATES = 8
"""Candidates to try however large the schedule is."""
PERIOD = 6
"""Slots of a block on one rank, where F, B and W of a chunk take one each."""
SHARES = (2 / 3, 0.5, 1.0, 0.75)
"""Shares of the slots that go to a leg down; the rest goes to the leg up that ends the same life span."""


def zb_v(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: StageCosts,
    memory_limit: Sequence[float] | None = None,
    overlap_communication: bool = True,
    recompute: Recompute = Recompute.NONE,
) -> Schedule:
    """No bubble where F = B = W, in 1F1B's memory: p M_B on every rank, unless told otherwise."""
    placement = Placement("v", num_ranks, 2)
    limits = tuple(memory_limit or _room_for(num_ranks, placement, costs, recompute))
    problem = Problem(placement, num_microbatches, costs, limits, overlap_communication, recompute)
    return recomputed_where_needed(problem, partial(_best, "zb-v"))


def v_half(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: StageCosts,
    memory_limit: Sequence[float] | None = None,
    overlap_communication: bool = True,
    recompute: Recompute = Recompute.NONE,
) -> Schedule:
    """About half of 1F1B's bubble where F = B = W, in p/2 + 1 M_B on every rank, unless told otherwise."""
    placement = Placement("v", num_ranks, 2)
    limits = tuple(memory_limit or _room_for(num_ranks / 2 + 1, placement, costs, recompute))
    problem = Problem(placement, num_microbatches, costs, limits, overlap_communication, recompute)
    return recomputed_where_needed(problem, partial(_best, "v-half"))


def v_min(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: StageCosts,
    memory_limit: Sequence[float] | None = None,
    overlap_communication: bool = True,
    recompute: Recompute = Recompute.NONE,
) -> Schedule:
    """About two thirds of 1F1B's bubble where F = B = W, in p/3 + 1 M_B on every rank, unless told otherwise."""
    placement = Placement("v", num_ranks, 2)
    limits = tuple(memory_limit or _room_for(num_ranks / 3 + 1, placement, costs, recompute))
    problem = Problem(placement, num_microbatches, costs, limits, overlap_communication, recompute)
    return recomputed_where_needed(problem, partial(_best, "v-min"))


def _room_for(
    num_held: float, placement: Placement, costs: StageCosts, recompute: Recompute = Recompute.NONE
) -> tuple[float, ...]:
    """Rank -> the memory of `num_held` microbatches on both of its chunks.

    With full recomputation they lack what R makes again, but for one.
    """
    rooms = []
    for rank in range(placement.num_ranks):
        room = num_held * _whole(placement, costs, rank) + sum(_added(placement, costs, rank))
        if recompute is Recompute.FULL:
            room -= (num_held - 1) * sum(costs.memory_r[stage] for stage in placement.stages_of(rank))
        rooms.append(room)
    return tuple(rooms)


def _best(name: str, problem: Problem) -> Schedule:
    """The best plan within the limits, among them plans in the default memory of the other V schedules, if less."""
    problem.check_feasible()
    plan = _search(problem)
    candidates = [problem.schedule(name, plan.orders)]
    rooms = [room for room in _other_rooms(problem) if room.bound < plan.cost]
    candidates += (room.schedule(name, _search(room).orders) for room in rooms)
    if max(problem.costs.memory_b) > 0 and not problem.recomputes:
        # The planner reserves room for what B adds from F on, and so fits few microbatches: fusing W may be better.
        together = (_back_to_back(name, room) for room in (problem, *rooms))
        candidates += (schedule for schedule in together if schedule is not None)
    if problem.recompute is Recompute.FULL:
        inside = replace(problem, costs=problem.costs.recomputing_in_backward(), recompute=Recompute.NONE)
        if inside.is_feasible:
            apart = with_recomputation(_best(name, inside))
            candidates += [apart] * fits(apart, problem)
    return best_of(candidates, problem) if len(candidates) > 1 else candidates[0]


def _other_rooms(problem: Problem) -> Iterator[Problem]:
    """The problem in the memory that ZB-V, V-Half and V-Min have by default, where that is less and enough."""
    p = problem.num_ranks
    for num_held in (p, p / 2 + 1, p / 3 + 1):
        room = replace(problem, limits=_room_for(num_held, problem.placement, problem.costs, problem.recompute))
        is_less = all(map(le, room.limits, problem.limits)) and room.limits != problem.limits
        if is_less and room.is_feasible:
            yield room


def _search(problem: Problem) -> PlannedOrders:
    portfolio = Portfolio(problem.bound, max(BUDGET, LEAST_CANDIDATES * problem.num_ops))
    portfolio.in_order(problem, problem.one_by_one())
    keepings = _keepings(problem)
    for orders in _candidates(problem):
        for rule, keeping in product((GapRule.BALANCED, GapRule.ALWAYS, GapRule.NEVER), keepings):
            if not portfolio.finished:
                portfolio.fill(problem, orders, rule, keeping=keeping)
    if problem.recompute is Recompute.PLANNED:
        portfolio.drop_into_idle_time(problem)
    portfolio.improve(problem, IMPROVING)
    assert portfolio.best is not None, "one microbatch after the other fits in any limit that is feasible"
    return portfolio.best


def _keepings(problem: Problem) -> list[Keeping]:
    """What is dropped to make room: chunk 0 is held longest, so that dropping it makes most."""
    if not problem.recomputes:
        return [Keeping()]
    dropped: list[frozenset[tuple[int, int]]] = [frozenset()]
    if problem.recompute is Recompute.PLANNED:
        for every in (1, 2):
            microbatches = range(0, problem.num_microbatches, every)
            dropped.append(frozenset(product(range(problem.num_ranks), microbatches)))
    return [Keeping(defers, drops) for drops in dropped for defers in (False, True)]


def _back_to_back(name: str, problem: Problem) -> Schedule | None:
    """The best plan in which every W follows its B, as if they were one operation; None if none fits."""
    costs, placement = problem.costs, problem.placement
    fused = replace(
        costs,
        time_b=tuple(map(add, costs.time_b, costs.time_w)),
        time_w=tuple(max(SMALLEST, 1e-6 * w) for w in costs.time_w),
        memory_b=tuple(map(add, costs.memory_b, costs.memory_w)),
        memory_w=(0,) * placement.num_stages,
    )
    limits = tuple(limit - max(_added(placement, costs, rank)) for rank, limit in enumerate(problem.limits))
    room = replace(problem, costs=fused, limits=limits)
    if not room.is_feasible:
        return None
    schedule = room.schedule(name, _search(room).orders)
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


def _num_held(problem: Problem) -> float:
    """How many microbatches every rank can hold on both of its chunks, if all are dropped that can be."""
    found: list[float] = []
    for rank, limit in enumerate(problem.limits):
        each, once = _whole(problem.placement, problem.costs, rank), 0.0
        if problem.recomputes:
            footprints = [problem.footprints[stage] for stage in problem.stages_of[rank]]
            each, once = sum(one.dropped for one in footprints), max(one.restored for one in footprints)
        if each > 0:
            found.append((limit - once) / each)
    return min(found, default=problem.num_ranks)


def _candidates(problem: Problem) -> Iterator[list[Order]]:
    """Orders of F and B, the most promising first."""
    p, held = problem.num_ranks, _num_held(problem)
    if held >= p:
        yield _eager(problem)
    yield from _blocks(problem, held)
    if problem.recomputes:
        # The more it holds, the more of it is dropped, or the less room there is for W's.
        for less in (2 * p, p, p / 2 + 1):
            if less < held:
                yield from _blocks(problem, less)
    if held < p:
        yield _eager(problem)


def _blocks(problem: Problem, held: float) -> Iterator[list[Order]]:
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
    """What an F and a B of one chunk take, with a message, and after how long a block is repeated."""

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
            kinds.append(slice(3 * size, 4 * size))
        return cls(f, b, 2 * sum(median(problem.duration[kind]) for kind in kinds))


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
