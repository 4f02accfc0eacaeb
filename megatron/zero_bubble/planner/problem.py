"""A planning problem, flattened into tuples that a planner's inner loop can index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from math import ceil
from operator import add

from megatron.zero_bubble.planner.bounds import lower_bounds
from megatron.zero_bubble.planner.codes import Codes, Order
from megatron.zero_bubble.planner.footprint import Footprint
from megatron.zero_bubble.planner.request import EFFORT, Limits, PlanRequest
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.graph import collective_time
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.shard_ops import shortest_delay

LONG = 30_000
"""More operations than this make a long problem: each candidate takes so much time that few are tried, none is improved
operation by operation, and one that is close to the bound is enough."""
CLOSE = 5e-4
"""How close to the bound is enough for a long problem, as a fraction of it."""


@dataclass(frozen=True)
class Problem:
    """Order F, B and W of every stage and microbatch so that the longest span of a rank, or the makespan, is short.

    `limits` is the memory that the operations of each rank may hold, in the unit of the costs;
    `overlap_communication` is as in `simulate`; `recompute` says which microbatches have an R; `budget` is how many
    operations a planner may plan in all candidates together, though it tries a few candidates of any size.
    """

    placement: Placement
    num_microbatches: int
    costs: StageCosts
    limits: tuple[float, ...]
    overlap_communication: bool = True
    recompute: Recompute = Recompute.NONE
    takes_makespan: bool = False
    """Whether an iteration is known to take the makespan, because it does not interlock with the next."""
    budget: int = EFFORT
    spread: float = 0.0
    """As in `PlanRequest`."""
    time_between: float = 0.0

    @classmethod
    def of(cls, request: PlanRequest, limits: Limits) -> Problem:
        """The problem of a checked request, within limits on the activations of every rank."""
        return cls(
            request.placement,
            request.num_microbatches,
            request.stage_costs,
            limits,
            request.overlap_communication,
            request.recompute,
            takes_makespan=request.is_judged_by_makespan,
            budget=request.effort,
            spread=request.spread if request.effort > 0 else 0.0,
            time_between=request.time_between if request.effort > 0 else 0.0,
        )

    @property
    def is_feasible(self) -> bool:
        """Whether B and W apart fit within the limits."""
        return all(
            limit >= least - tolerance(least) for limit, least in zip(self.limits, self.smallest_limits, strict=True)
        )

    def check_feasible(self) -> None:
        """Raise `Infeasible`, with the smallest limit that works on every rank, if B and W apart do not fit."""
        for rank, (needed, limit) in enumerate(zip(self.smallest_limits, self.limits, strict=True)):
            if limit < needed - tolerance(needed):
                smallest = max(self.smallest_limits)
                raise Infeasible(
                    f"rank {rank} needs at least {needed:g} of memory, above the limit of {limit:g}; "
                    f"{smallest:g} is enough for every rank",
                    smallest,
                )

    @property
    def is_long(self) -> bool:
        """Whether little is tried, because it takes long (see `LONG`)."""
        return self.num_ops > LONG

    @property
    def aim(self) -> float:
        """The cost of a plan that is good enough."""
        return self.bound * (1 + (CLOSE if self.is_long else 1e-9))

    @property
    def is_judged_by_makespan(self) -> bool:
        """Whether a plan is as good as its makespan is short, and not its longest span.

        An iteration takes the makespan, unless it interlocks with the next. Where the planner chooses what is
        recomputed, it could shorten the span much at the cost of the makespan.
        """
        return self.recompute is Recompute.PLANNED or self.takes_makespan

    def judged(self, span: float, makespan: float) -> tuple[float, float]:
        """The time by which a plan is judged, and the other one, which decides between equals."""
        return (makespan, span) if self.is_judged_by_makespan else (span, makespan)

    @property
    def varies(self) -> bool:
        """Whether plans are compared by their expected time."""
        return self.spread > 0 or self.time_between > 0

    def keeping_everything(self) -> Problem:
        """The same problem without R: every F keeps its activations."""
        return replace(self, costs=self.costs.keeping_everything(), recompute=Recompute.NONE)

    def recomputing_in_backward(self) -> Problem:
        """The same problem without R: every B recomputes the activations that its F drops."""
        return replace(self, costs=self.costs.recomputing_in_backward(), recompute=Recompute.NONE)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_ops(self) -> int:
        """The operations without R."""
        of_shards = 4 * self.num_ranks + 1 if self.has_shards else 0
        return (3 * self.num_stages + of_shards) * self.num_microbatches

    @cached_property
    def has_shards(self) -> bool:
        """Whether embedding and output layer are spread over all ranks."""
        return self.costs.has_vocabulary

    @property
    def leaves_out_named(self) -> bool:
        """Whether named schedules are no candidates.

        To insert shards into their order takes longer than a quick plan. Where the planner chooses what to recompute,
        they are candidates of the plan that keeps everything, if one fits.
        """
        has_tried_them = self.recompute is Recompute.PLANNED and self.keeping_everything().is_feasible
        return has_tried_them or (self.has_shards and self.budget == 0)

    @cached_property
    def codes(self) -> Codes:
        return Codes.of(self.num_stages)

    @cached_property
    def collective(self) -> float:
        """Time of an exchange between all ranks."""
        return collective_time(self.costs)

    @cached_property
    def delay(self) -> float:
        """Least time between the F and the B of the last stage: with shards that of softmax and loss, else none."""
        return shortest_delay(self.costs) if self.has_shards else 0.0

    @cached_property
    def interval(self) -> float:
        """Time that one microbatch takes of the busiest rank."""
        return max(self.work) / self.num_microbatches

    @cached_property
    def num_delayed(self) -> int:
        """Microbatches that a rank has in flight because of the delay."""
        return ceil(self.delay / self.interval - 1e-9)

    @property
    def recomputes(self) -> bool:
        """Whether any microbatch may have an R."""
        return self.recompute is not Recompute.NONE

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Stage -> rank."""
        return tuple(self.placement.rank_of(stage) for stage in range(self.num_stages))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Code -> rank."""
        ranks = list(self.rank_of) * (self.codes.end // self.num_stages)
        ranks[self.codes.loss] = self.rank_of[-1]
        return tuple(ranks)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Rank -> its stages in model order."""
        return tuple(map(self.placement.stages_of, range(self.num_ranks)))

    @cached_property
    def message(self) -> tuple[float, ...]:
        """Edge -> latency of a message between stage s and s + 1 that occupies no rank."""
        return self._messages if self.overlap_communication else (0,) * len(self._messages)

    @cached_property
    def links(self) -> tuple[tuple[int, int, float], ...]:
        """(code, code that waits for its result, latency of the result) of the same microbatch.

        W and R, which wait for an operation of their own stage and rank, are left out. So are the embeddings of the
        first rank, which wait for nothing.
        """
        codes = self.codes
        links = [(stage, stage + 1, latency) for stage, latency in enumerate(self.message)]
        links += [(codes.b + stage + 1, codes.b + stage, latency) for stage, latency in enumerate(self.message)]
        if not self.has_shards:
            return (*links, (codes.b - 1, codes.w - 1, 0.0))
        first, last = self.rank_of[0], self.rank_of[-1]
        links.append((codes.loss, codes.w - 1, 0.0))
        for rank in range(self.num_ranks):
            to_first, to_last = self.collective * (rank != first), self.collective * (rank != last)
            if rank != first:
                links.append((codes.e + first, codes.e + rank, self.collective))
            links += [(codes.e + rank, codes.f, to_first), (codes.b, codes.ew + rank, to_first)]
            links += [(codes.b - 1, codes.s + rank, to_last), (codes.s + rank, codes.loss, to_last)]
            links.append((codes.loss, codes.t + rank, to_last))
        return tuple(links)

    @cached_property
    def users(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Code -> the codes that wait for its result, each with the latency of the result."""
        users: list[list[tuple[int, float]]] = [[] for _ in range(self.codes.end)]
        for source, target, latency in self.links:
            users[source].append((target, latency))
        return tuple(map(tuple, users))

    @cached_property
    def receiving(self) -> tuple[float, ...]:
        """Code -> time that its rank is occupied with receiving its input, right before it."""
        edges = (0,) * len(self._messages) if self.overlap_communication else self._messages
        return (0, *edges, *edges, 0, *(0,) * (2 * self.num_stages), 0, *edges, *(0,) * (5 * self.num_stages))

    @cached_property
    def sending(self) -> tuple[float, ...]:
        """Code -> time that its rank is occupied with sending its result, right after it."""
        edges = (0,) * len(self._messages) if self.overlap_communication else self._messages
        return (*edges, 0, 0, *edges, *(0,) * (2 * self.num_stages), *edges, 0, *(0,) * (5 * self.num_stages))

    @cached_property
    def latency(self) -> tuple[float, ...]:
        """Code -> time from when its rank turns to it, with its input ready, to its result."""
        times = self.costs.times()
        compute = chain.from_iterable(times[kind] for kind in self.codes.kinds)
        return tuple(map(add, self.receiving, compute))

    @cached_property
    def duration(self) -> tuple[float, ...]:
        """Code -> time that it occupies its rank."""
        return tuple(map(add, self.latency, self.sending))

    @cached_property
    def _messages(self) -> tuple[float, ...]:
        return self.costs.messages(self.placement)

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """Stage -> memory of a microbatch there."""
        return tuple(Footprint.of(self.costs, stage) for stage in range(self.num_stages))

    @cached_property
    def allocation(self) -> tuple[float, ...]:
        """Code -> change of memory, above zero for F and R only."""
        f = tuple(each.whole for each in self.footprints)
        b = tuple(each.after_b - each.whole for each in self.footprints)
        w = tuple(each.after_w - each.after_b for each in self.footprints)
        r = tuple(each.restored for each in self.footprints)
        dropped = tuple(each.dropped for each in self.footprints)
        memory = self.costs.memory()
        return f + b + w + r + dropped + tuple(chain.from_iterable(memory[kind] for kind in self.codes.kinds[5:]))

    def is_dropped_as_a_rule(self, stage: int) -> bool:
        """Whether most microbatches of `stage` have an R."""
        return self.recompute is Recompute.FULL and stage < self.num_stages - 1

    @cached_property
    def work(self) -> tuple[float, ...]:
        """For each rank, the total time of its operations, if each R is at its usual place."""
        kinds = (self.codes.f, self.codes.b, self.codes.w, *self.codes[5:-1])
        each = [
            sum(self.duration[first + s] for first in (*kinds, *(self.codes.r,) * self.is_dropped_as_a_rule(s)))
            for s in range(self.num_stages)
        ]
        return tuple(self.num_microbatches * sum(each[s] for s in stages) for stages in self.stages_of)

    @cached_property
    def bound_if_fused(self) -> float:
        """A lower bound on the longest span of a rank, also for schedules that fuse B and W."""
        return lower_bounds(self.placement, self.num_microbatches, self.costs, self.limits, self.recompute).span

    @cached_property
    def bound(self) -> float:
        """A lower bound on the longest span of a rank, or on the makespan if it is the time of an iteration.

        A rank's span has all of its messages but the one before its first F: its last operation, a W, sends nothing.
        """
        known = self.bound_if_fused
        if self.recompute is Recompute.FULL:
            return known
        if self.takes_makespan:
            earliest = accumulate(map(add, self.latency, self.message), initial=0.0)
            return max(known, *map(add, self.work, earliest))
        firsts = (self.receiving[stages[0]] for stages in self.stages_of)
        return max(known, *(work - first for work, first in zip(self.work, firsts, strict=True)))

    @cached_property
    def smallest_limits(self) -> tuple[float, ...]:
        """Rank -> the memory it needs if it runs one microbatch after the other.

        No schedule with B and W apart needs less: a microbatch is in all stages of a rank at once between
        its last F there and its first B. With recomputation one of the stages holds it whole, and the stages before
        it lack the activations that R restores.
        """
        return tuple(
            self._most_held(stages)
            + self.costs.memory_s[stages[0]]
            + (self.num_microbatches - 1) * sum(self.footprints[s].after_w for s in stages)
            for stages in self.stages_of
        )

    def _most_held(self, stages: Sequence[int]) -> float:
        """The largest memory that one microbatch, alone on a rank, takes in its stages."""
        footprints = [self.footprints[s] for s in stages]
        if not self.recomputes:
            return sum(each.whole for each in footprints)
        held = [
            sum(each.dropped for each in footprints[:i])
            + here.whole
            + sum(each.after_w for each in footprints[i + 1 :])
            for i, here in enumerate(footprints)
        ]
        return max(held)

    def one_by_one(self) -> list[Order]:
        """The order with the smallest memory: one microbatch after the other."""
        codes, last_rank = self.codes, self.rank_of[-1]
        orders: list[Order] = []
        for rank, stages in enumerate(self.stages_of):
            dropped = stages[:-1] if self.recomputes else ()
            order = [codes.e + rank] * self.has_shards
            order += [s + codes.drop if s in dropped else s for s in stages]
            if self.has_shards:
                order += [codes.s + rank, *(codes.loss,) * (rank == last_rank)]
            for s in reversed(stages):
                order += [*(codes.r + s,) * (s in dropped), codes.b + s, codes.w + s]
            orders.append((order + [codes.t + rank, codes.ew + rank] * self.has_shards) * self.num_microbatches)
        return orders

    def schedule(self, orders: Sequence[Order]) -> Schedule:
        """The orders as a schedule, whose name is `planned`."""
        kinds, size = self.codes.kinds, self.num_stages
        what = [(kinds[code // size], self.placement.chunk_of(code % size)) for code in range(self.codes.end)]
        what[self.codes.loss] = (OpKind.L, 0)
        ranks = (
            tuple(Op(what[code][0], microbatch, what[code][1]) for code, microbatch in self.codes.microbatches(order))
            for order in orders
        )
        return Schedule("planned", self.placement, self.num_microbatches, tuple(ranks))

    def orders(self, schedule: Schedule) -> list[Order]:
        """A schedule without communication as orders; both gradients in one operation become B and W."""
        codes, orders = self.codes, []
        first = dict(zip(codes.kinds[:4] + codes.kinds[5:], codes[:4] + codes[5:-1], strict=True))
        for rank, ops in enumerate(schedule.ops):
            stages = self.stages_of[rank]
            dropped = {(op.microbatch, op.chunk) for op in ops if op.kind is OpKind.R}
            order = []
            for kind, microbatch, chunk in ops:
                if kind is OpKind.F and (microbatch, chunk) in dropped:
                    order.append(codes.drop + stages[chunk])
                elif kind is OpKind.L:
                    order.append(codes.loss)
                else:
                    order += [first[result] + stages[chunk] for result in KINDS[kind].makes]
            orders.append(order)
        return orders

    def without_shards(self) -> Problem:
        """The same problem with a whole vocabulary whose time every W takes, and one microbatch less in flight."""
        limits = tuple(
            limit - sum(self.footprints[s].whole for s in stages)
            for limit, stages in zip(self.limits, self.stages_of, strict=True)
        )
        return replace(self, costs=self.costs.with_vocabulary_in_weight_gradients(), limits=limits)


def tolerance(amount: float) -> float:
    """The amount by which sums of floats that should be equal may differ."""
    return 1e-9 * abs(amount)
