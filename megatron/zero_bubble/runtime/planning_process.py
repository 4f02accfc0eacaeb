"""Plans the next step in another process while the present one runs."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import cast

from megatron.zero_bubble.planner import step_worker
from megatron.zero_bubble.planner.step_plan import StepPlan, StepProblem
from megatron.zero_bubble.schedule.errors import Infeasible


class PlanningProcess:
    """A process that plans one step at a time; a thread would take the interpreter from the step that runs."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", step_worker.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planning")
        self._asked: tuple[StepProblem, Future[StepPlan | Infeasible]] | None = None
        self.close = weakref.finalize(self, _end, self._thread, self._connection, self.worker)

    @property
    def is_busy(self) -> bool:
        """Whether it still plans."""
        return self._asked is not None and not self._asked[1].done()

    def ask(self, problem: StepProblem) -> None:
        """Begin to plan a step; nothing may be planned at present."""
        self._asked = problem, self._thread.submit(self._answer, problem)

    def _answer(self, problem: StepProblem) -> StepPlan | Infeasible:
        self._connection.send(problem)
        return cast("StepPlan | Infeasible", self._connection.recv())

    def plans(self, problem: StepProblem) -> bool:
        """Whether this problem was asked last."""
        return self._asked is not None and self._asked[0].is_as(problem)

    def answer(self) -> StepPlan | Infeasible | None:
        """Wait for the plan of the problem that was asked last; None if the process has ended."""
        assert self._asked is not None
        try:
            return self._asked[1].result()
        except (EOFError, OSError):
            return None


def _end(thread: ThreadPoolExecutor, connection: Connection, worker: subprocess.Popen[bytes]) -> None:
    thread.shutdown()
    connection.close()
    worker.wait()
