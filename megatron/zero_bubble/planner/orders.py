"""Converts schedules to lists of operation codes and back, and makes the orders that need the least memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind


def one_by_one(problem: Problem) -> list[Order]:
    """The orders with the smallest peak memory, in which a rank finishes each microbatch before it starts the next."""
    codes, last_rank = problem.codes, problem.rank_of[-1]
    orders: list[Order] = []
    for rank, stages in enumerate(problem.stages_of):
        dropped = stages[:-1] if problem.recomputes else ()
        order = [codes.e + rank] * problem.has_shards
        order += [s + codes.drop if s in dropped else s for s in stages]
        if problem.has_shards:
            order += [codes.s + rank, *(codes.loss,) * (rank == last_rank)]
        for s in reversed(stages):
            order += [*(codes.r + s,) * (s in dropped), codes.b + s, codes.w + s]
        orders.append((order + [codes.t + rank, codes.ew + rank] * problem.has_shards) * problem.num_microbatches)
    return orders


def schedule_of_orders(problem: Problem, orders: Sequence[Order]) -> Schedule:
    """Convert the orders of all ranks to a schedule with the name `planned`."""
    kinds, size = problem.codes.kinds, problem.num_stages
    decoded = [(kinds[code // size], problem.placement.chunk_of(code % size)) for code in range(problem.codes.end)]
    decoded[problem.codes.loss] = (OpKind.L, 0)
    ranks = (
        tuple(
            Op(decoded[code][0], microbatch, decoded[code][1]) for code, microbatch in problem.codes.microbatches(order)
        )
        for order in orders
    )
    return Schedule("planned", problem.placement, problem.num_microbatches, tuple(ranks))


def orders_of_schedule(problem: Problem, schedule: Schedule) -> list[Order]:
    """Convert a schedule without sends and receives to one order per rank; a BW becomes a B and a W."""
    codes, orders = problem.codes, []
    first = codes.first
    for rank, ops in enumerate(schedule.ops):
        stages = problem.stages_of[rank]
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
