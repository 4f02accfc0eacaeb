"""Plans each training step whose microbatches differ in size, from costs that depend on the microbatch sizes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from megatron.zero_bubble.planner import step_worker
from megatron.zero_bubble.planner.microbatch_order import MicrobatchOrder, like_order
from megatron.zero_bubble.planner.step_plan import StepPlan, StepProblem, StepRules
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.size_profile import SizeProfile
from megatron.zero_bubble.schedule import Infeasible, Placement, Schedule, StageCosts
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize, SizedCosts

FIRST_STEPS = (1, 3)
"""The first and the last step to measure in a run that profiles no steps."""
REFITTED_AFTER = 8
"""Number of steps between the first and the second fit of the costs; the second fit uses more samples."""
_WAITED = 1.0
"""Planning counts as overlapped with training if a step waits for its plan at most this many milliseconds."""

T = TypeVar("T")
ReadSizes = Callable[[], Sequence[MicrobatchSize | None]]
"""Function that returns the sizes of a step's microbatches in the order of the data, with None for unknown sizes."""


class Peers(Protocol):
    """Communicates with the other ranks that train the same model."""

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on a pipeline's first rank; on all ranks, return its result or raise its `Infeasible` error."""

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank whose measurements are fitted together."""

    def highest(self, level: int) -> int:
        """Return the highest `StepDecision.level` of all pipelines; called on the first rank of each pipeline."""


@dataclass
class OrderTimes:
    """Number of planned steps since the last report, and sums of the steps' times in milliseconds."""

    num_steps: int = 0
    predicted: float = 0.0
    predicted_in_data_order: float = 0.0
    planning: float = 0.0
    num_not_hidden: int = 0
    """Number of steps that waited for their plan longer than `_WAITED`."""
    num_late: int = 0
    """Number of steps that ran in an earlier step's order because their plan was late; not counted in `num_steps`."""
    num_in_less_memory: int = 0
    """Number of steps that ran a schedule that needs less memory than the run's own schedule."""


class StepDecision(NamedTuple):
    """The order of microbatches and the schedule that a pipeline's first rank has chosen for a step."""

    sizes: list[MicrobatchSize] | None
    """Sizes of the microbatches in the order of the data; None if any size is unknown."""
    places: tuple[int, ...]
    """For each position in the schedule, the index of the microbatch of the data that runs at this position."""
    level: int = 0
    """Memory level of the schedule: 0 for the run's own schedule (see `StepPlan.level`)."""
    schedule: Schedule | None = None
    """The schedule that needs less memory than the run's own schedule; None if the step runs the run's own schedule."""
    order: MicrobatchOrder | None = None
    """The planned order of microbatches; None if the step takes the order of the data or of an earlier plan."""
    milliseconds: float = 0.0
    """Milliseconds that planning took."""
    waited: float = 0.0
    """Milliseconds for which the step waited for its plan."""
    is_late: bool = False
    """Whether the plan of the step was not ready, so that the step takes the order of an earlier step."""

    def in_data_order(self, results: list[Any]) -> list[Any]:
        """Reorder the `results` of microbatches from the order of the schedule to the order of the data."""
        if len(results) != len(self.places):
            return results
        return [result for _, result in sorted(zip(self.places, results, strict=True), key=lambda pair: pair[0])]


class StepPlanner:
    """Plans the steps of a run. Microbatches keep the order of the data until costs and microbatch sizes are known.

    Args:
        placement: assigns stages to ranks.
        rank: this process's pipeline rank.
        observer: provides the measured operations of each step.
        measured: the first and the last step that are measured before the first fit of costs.
        peers: communicates with the other ranks.
    """

    def __init__(
        self, placement: Placement, rank: int, observer: StepObserver, measured: tuple[int, int], peers: Peers
    ) -> None:
        self._profile = SizeProfile(placement, rank)
        self._observer, self._peers = observer, peers
        self._first, last = measured
        self._fits_after = {last, last + REFITTED_AFTER}
        self._costs: SizedCosts | None = None
        self._times = OrderTimes()
        self._decides = False
        self._last_orders: dict[int, tuple[tuple[int, ...], Sequence[MicrobatchSize]]] = {}
        """Number of microbatches -> the last planned order of that many microbatches, and the microbatches' sizes."""
        self._process: PlanningProcess | None = None
        observer.sinks.append(self._profile.collect)

    def measures(self, step: int) -> bool:
        """Return whether the training step number `step` is measured."""
        return self._first <= step <= max(self._fits_after)

    def take_times(self) -> OrderTimes:
        """Return the `OrderTimes` of the steps since the last call of `take_times`."""
        times, self._times = self._times, OrderTimes()
        return times

    def decide(
        self,
        step: int,
        rules: StepRules,
        num_microbatches: int,
        read_sizes: ReadSizes,
        read_next_sizes: ReadSizes = lambda: (),
    ) -> StepDecision:
        """Plan a step; a collective call of a pipeline's ranks, and of all pipelines' ranks if there are memory limits.

        Args:
            step: number of the step.
            rules: the schedules, limits and options of the run.
            num_microbatches: number of microbatches of the step.
            read_sizes: returns the sizes of the step's microbatches; called on the first rank.
            read_next_sizes: returns the sizes of the next step's microbatches, or an empty sequence if the sizes are
                unknown. If the sizes are known, the next step is planned while the current step runs. `read_next_sizes`
                is called on the first rank, after the other ranks have received the plan of the current step.

        Raises:
            Infeasible: the step exceeds the memory limits even if the microbatches run one after the other.
        """
        decision = self._peers.on_first(lambda: self._decide(rules, num_microbatches, read_sizes()))
        if self._decides and (sizes := read_next_sizes()):
            self._process = self._process or PlanningProcess()
            problem = self._problem(rules, num_microbatches, sizes)
            if problem is not None and not self._process.is_busy:
                self._process.ask(problem)
        if decision.sizes is not None and self.measures(step):
            schedule = decision.schedule or rules.plan.schedule(num_microbatches)
            self._profile.note(step, [decision.sizes[number] for number in decision.places], schedule.groups)
        if decision.order is not None:
            self._times.num_steps += 1
            self._times.predicted += decision.order.time
            self._times.predicted_in_data_order += decision.order.time_in_data_order
            self._times.planning += decision.milliseconds
            self._times.num_not_hidden += decision.waited > _WAITED
            self._times.num_in_less_memory += decision.level > 0
        self._times.num_late += decision.is_late
        return decision

    def close(self) -> None:
        """End the process that plans the next step."""
        if self._process is not None:
            self._process.close()

    def _problem(self, rules: StepRules, count: int, sizes: Sequence[MicrobatchSize | None]) -> StepProblem | None:
        """Return the planning problem of a step; None if costs or sizes are unknown, or if there is nothing to plan."""
        known = tuple(size for size in sizes if size is not None)
        if self._costs is None or len(known) != count:
            return None
        problem = StepProblem(rules, self._costs, known)
        return problem if problem.is_open else None

    def _decide(self, rules: StepRules, count: int, sizes: Sequence[MicrobatchSize | None]) -> StepDecision:
        self._decides = True
        start, problem = time.perf_counter(), self._problem(rules, count, sizes)
        known = [size for size in sizes if size is not None]
        as_it_comes = StepDecision(known if len(known) == count else None, tuple(range(count)))
        if problem is not None and self._is_late(problem):
            places, before = self._last_orders[count]
            return as_it_comes._replace(places=like_order(places, before, known), is_late=True)
        answer = None if problem is None else self._answer(problem)
        if rules.limits is not None and self._costs is not None:
            # Pipelines reduce gradients together, and therefore all pipelines run the same schedule.
            level = self._peers.highest(answer.level if isinstance(answer, StepPlan) else 0)
            if problem is not None and isinstance(answer, StepPlan) and level > answer.level:
                answer = problem.solve(least_level=level)
        if isinstance(answer, Infeasible):
            raise answer
        if answer is None:
            return as_it_comes
        level, schedule, order, milliseconds = answer
        self._last_orders[count] = order.places, known
        waited = 1000.0 * (time.perf_counter() - start)
        return StepDecision(known, order.places, level, schedule if level else None, order, milliseconds, waited)

    def _is_late(self, problem: StepProblem) -> bool:
        """Return whether the step uses the order of an earlier step, because the plan for `problem` is not ready."""
        process, rules = self._process, problem.rules
        is_planned = process is not None and process.is_busy and process.plans(problem)
        return is_planned and rules.limits is None and len(problem.sizes) in self._last_orders

    def _answer(self, problem: StepProblem) -> StepPlan | Infeasible:
        """Return the plan that the `PlanningProcess` has made for `problem`, or solve `problem` in this process."""
        if self._process is not None and self._process.plans(problem):
            answer = self._process.answer()
            if answer is not None:
                return answer
        try:
            return problem.solve()
        except Infeasible as error:
            return error

    def after_step(self, step: int, usual: Callable[[], StageCosts]) -> None:
        """Fit costs as functions of microbatch sizes if `step` is the last of a series of measured steps.

        `after_step` is a collective call of the whole job.

        Args:
            usual: returns the costs of a microbatch of mean size.
        """
        if step in self._fits_after:
            self._observer.flush()
            self._costs = self._profile.fit(usual(), self._peers.gather)


class PlanningProcess:
    """A process that plans one step at a time.

    Planning in a thread would compete with the running step for Python's global interpreter lock.
    """

    def __init__(self) -> None:
        self._connection, child_end = Pipe()
        with child_end:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", step_worker.__name__, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planning")
        self._asked: tuple[StepProblem, Future[StepPlan | Infeasible]] | None = None
        self.close = weakref.finalize(self, _end, self._thread, self._connection, self.worker)

    @property
    def is_busy(self) -> bool:
        """Whether the planning process has not yet answered the last call of `ask`."""
        return self._asked is not None and not self._asked[1].done()

    def ask(self, problem: StepProblem) -> None:
        """Start to solve `problem` in the planning process, which must not be busy; return at once."""
        self._asked = problem, self._thread.submit(self._answer, problem)

    def _answer(self, problem: StepProblem) -> StepPlan | Infeasible:
        self._connection.send(problem)
        return cast("StepPlan | Infeasible", self._connection.recv())

    def plans(self, problem: StepProblem) -> bool:
        """Return whether `problem` equals the problem in the last call of `ask`."""
        return self._asked is not None and self._asked[0].is_as(problem)

    def answer(self) -> StepPlan | Infeasible | None:
        """Wait for and return the answer to the last call of `ask`; None if the planning process has ended."""
        assert self._asked is not None
        try:
            return self._asked[1].result()
        except (EOFError, OSError):
            return None


def _end(thread: ThreadPoolExecutor, connection: Connection, worker: subprocess.Popen[bytes]) -> None:
    thread.shutdown()
    connection.close()
    worker.wait()
