"""Searches for the best schedule of a small instance, and for a lower bound, with OR-tools' constraint solver CP-SAT.

Every F, B and W is a time interval on its rank. The constraint program has four constraints: the intervals of a rank do
not overlap; a stage runs the operations of one kind in microbatch order; an operation starts after its inputs are
ready; and the memory that F allocates and that B and W release never exceeds the memory limit. The solver minimizes the
longest span of a rank, and starts from the schedule of the planner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.zero_bubble.planner.auto import limit_of_1f1b, limits_of_multiple, planned
from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.orders import schedule_of_orders
from megatron.zero_bubble.planner.portfolio import best_of, fits
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.timeline import Timeline

TIME_LIMIT = 20.0
"""Seconds after which the solver stops."""
RESOLUTION = 10_000
"""Number of time steps in the longest operation; the solver's times are whole numbers of these steps."""
TOLERANCE = 5e-4
"""A schedule within this relative distance from the lower bound counts as optimal, because times are rounded."""
LONGEST = 2**40
"""Largest sum of the time steps of all operations, well below the largest integer of the solver, 2**63."""
MAX_OPERATIONS = 1_000
"""Largest number of F, B and W; in larger instances the solver does not even find the schedule given as its hint."""
_KINDS = (OpKind.F, OpKind.B, OpKind.W)


@dataclass(frozen=True)
class Solution:
    """A schedule of an instance, and a lower bound on the longest span of a rank in any schedule of the instance."""

    schedule: Schedule
    cost: float
    """The longest span of a rank, simulated with the exact costs."""
    bound: float
    """A lower bound on the longest span of a rank in any schedule of the instance."""

    @property
    def is_optimal(self) -> bool:
        """Whether the schedule reaches the lower bound, up to the resolution of the solver."""
        return self.cost <= self.bound * (1 + TOLERANCE)


def optimal(request: PlanRequest) -> Schedule:
    """Make the schedule `optimal`; on p ranks the default memory limit is the memory of 2p microbatches in flight.

    The constraint program has no recomputation (R). With planned recomputation under a memory limit, the function
    returns the better of two schedules: the schedule `auto`, and the solver's schedule, which keeps all activations.
    Under full recomputation, the function returns the better of two schedules: the schedule `auto`, and the solver's
    schedule in which each B includes its recomputation. R is separated from B after the solver has finished.

    Raises:
        Infeasible: no schedule fits in the memory limit.
        ScheduleError: OR-tools is not installed, or the instance is too large.
    """
    recompute, costs, limits = request.recompute, request.stage_costs, request.limits
    if recompute is Recompute.NONE or (recompute is Recompute.PLANNED and limits is None):
        return solve(replace(request, costs=costs.keeping_everything(), recomputes=(Recompute.NONE,))).schedule
    limits = limits or limits_of_multiple(2, request)
    problem, request = Problem.of(request, limits), request.within(limits)
    is_full = recompute is Recompute.FULL
    without_r = problem.recomputing_in_backward() if is_full else problem.keeping_everything()
    candidates = [planned(limit_of_1f1b, request)]
    if without_r.is_feasible:
        solved = solve(replace(request, costs=without_r.costs, recomputes=(Recompute.NONE,))).schedule
        candidates.append(with_recomputation(solved) if is_full else solved)
    candidates = [schedule for schedule in candidates if fits(schedule, problem)]
    return replace(best_of(candidates, problem), name="optimal")


def solve(request: PlanRequest, time_limit: float = TIME_LIMIT) -> Solution:
    """Search for the best schedule of an instance with one chunk per rank.

    Args:
        request: a checked request without recomputation.
        time_limit: seconds that the solver may take.

    Returns:
        The best schedule and the best lower bound that were found; the returned schedule is never slower than the
        schedule `auto`.

    Raises:
        Infeasible: no schedule fits in the memory limit.
        ScheduleError: OR-tools is not installed, or the instance is too large.
    """
    num_ranks, num_microbatches, costs = request.num_ranks, request.num_microbatches, request.stage_costs
    if 3 * num_ranks * num_microbatches > MAX_OPERATIONS:
        raise ScheduleError(
            f"schedule optimal is for small instances: {num_ranks} ranks x {num_microbatches} microbatches "
            f"are more than {MAX_OPERATIONS // 3}; use auto"
        )
    limits = request.limits or limits_of_multiple(2, request)
    problem = Problem.of(request, limits)
    start = planned(limit_of_1f1b, request.within(limits))
    timeline = problem.simulated(start)
    bound = float(lower_bound(start.placement, num_microbatches, costs, limits))
    best = Solution(replace(start, name="optimal"), timeline.cost, bound)
    if best.is_optimal:
        return best
    program = _Program(problem)
    program.add_hint(timeline)
    orders, proven = program.solve(time_limit, bound)
    best = replace(best, bound=max(bound, proven))
    if orders is None:
        return best
    improved = replace(schedule_of_orders(problem, orders), name="optimal")
    cost = problem.simulated(improved).cost
    return replace(best, schedule=improved, cost=cost) if cost < best.cost else best


class _Program:
    """The constraint program of a planning problem. A time step is `1 / scale` of the unit of the costs."""

    def __init__(self, problem: Problem) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError:
            raise ScheduleError("schedule optimal needs OR-tools: pip install 'megatron-zero-bubble[solver]'") from None
        self._cp: Any = cp_model
        self._model = cp_model.CpModel()
        self._problem = problem
        self._costs = costs = problem.costs
        self._times = (*costs.time_f, *costs.time_b, *costs.time_w)
        """Code of an operation -> time of its computation."""
        self._scale = RESOLUTION / max(self._times)
        horizon = sum(self._steps(work) + 9 * problem.num_microbatches for work in problem.work)
        horizon += 2 * sum(self._steps(time) for time in costs.time_comm)
        if horizon > LONGEST:
            raise ScheduleError("schedule optimal needs times of similar size: the times are too far apart; use auto")
        self._span = self._model.new_int_var(0, horizon, "span")
        self._starts = {
            (code, k): self._model.new_int_var(0, horizon, f"{code}:{k}")
            for code in range(len(self._times))
            for k in range(problem.num_microbatches)
        }
        """(code of an operation, microbatch) -> start of its computation."""
        for stage in range(problem.num_stages):
            self._add_stage(stage)
            self._add_memory(stage)
        for source, target, latency in problem.links:
            delay = self._steps(latency) + self._steps(problem.receiving[target])
            self._add_dependency(source, target, delay)
        self._model.minimize(self._span)

    def add_hint(self, timeline: Timeline) -> None:
        """Give the start times of `timeline` to the solver as a hint."""
        for rank, lane in enumerate(timeline.lanes):
            for op, start, _ in lane:
                for kind in KINDS[op.kind].makes:
                    code = _KINDS.index(kind) * self._problem.num_stages + rank
                    delay = self._costs.time_b[rank] * (kind is OpKind.W and op.kind is OpKind.BW)
                    self._model.add_hint(self._starts[code, op.microbatch], self._steps(start + delay))

    def solve(self, time_limit: float, bound: float) -> tuple[list[Order] | None, float]:
        """Run the solver.

        Args:
            time_limit: seconds that the solver may take.
            bound: a known lower bound on the longest span of a rank, in the unit of the costs.

        Returns:
            The best orders that were found, or None, and a lower bound on the longest span, in the unit of the costs.
        """
        # The lower bound for exact costs is reduced so that it excludes no solution with rounded costs.
        slack = len(self._starts)
        self._model.add(self._span >= max(0, self._steps(bound) - slack))
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit
        status = solver.solve(self._model)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return None, 0.0
        orders: list[Order] = [[] for _ in range(self._problem.num_stages)]
        for code, _ in sorted(self._starts, key=lambda op: (solver.value(self._starts[op]), op)):
            orders[code % len(orders)].append(code)
        # The solver's lower bound is reduced too: rounded times on the critical path are wrong by up to half a step.
        return orders, (solver.best_objective_bound - slack) / self._scale

    def _steps(self, time: float) -> int:
        return round(float(time) * self._scale)

    def _duration(self, code: int) -> int:
        return max(1, self._steps(self._times[code]))

    def _end(self, code: int, microbatch: int) -> Any:
        return self._starts[code, microbatch] + self._duration(code)

    def _add_dependency(self, source: int, target: int, delay: int = 0) -> None:
        for k in range(self._problem.num_microbatches):
            self._model.add(self._starts[target, k] >= self._end(source, k) + delay)

    def _add_stage(self, stage: int) -> None:
        problem, intervals = self._problem, []
        f, b, w = range(stage, len(self._times), problem.num_stages)
        for code in (f, b, w):
            receiving, sending = self._steps(problem.receiving[code]), self._steps(problem.sending[code])
            occupied = receiving + self._duration(code) + sending
            for k in range(problem.num_microbatches):
                start = self._starts[code, k]
                intervals.append(self._model.new_fixed_size_interval_var(start - receiving, occupied, f"i{code}:{k}"))
                if k > 0:
                    self._model.add(start >= self._end(code, k - 1))
        self._model.add_no_overlap(intervals)
        self._add_dependency(b, w)
        self._model.add(self._span >= self._end(w, problem.num_microbatches - 1) - self._starts[f, 0])

    def _add_memory(self, stage: int) -> None:
        costs, m, limit = self._costs, self._problem.num_microbatches, self._problem.limits[stage]
        changes = costs.memory_f[stage], costs.memory_b[stage], costs.memory_w[stage]
        if limit >= m * sum(max(0, change) for change in changes):
            return
        f, b, w = range(stage, len(self._times), self._problem.num_stages)
        unit = RESOLUTION / max(*map(abs, changes), 1e-30)
        demands = [round(change * unit) for change in changes] * m
        times = [time for k in range(m) for time in (self._starts[f, k], self._end(b, k), self._end(w, k))]
        low = min(0, sum(demand for demand in demands if demand < 0))
        # The limit is raised by half a unit for each rounded change of memory.
        high = int(limit * unit) + len(demands) // 2
        self._model.add_reservoir_constraint(times, demands, low, high)
