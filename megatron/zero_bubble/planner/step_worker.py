"""A process that plans steps for a training process, and ends when the training process ends.

The command-line argument of the planning process is the file descriptor of a connection to the training process. The
planning process answers each `StepProblem` with a `StepPlan` or an `Infeasible`.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from megatron.zero_bubble.planner.step_plan import StepPlan
from megatron.zero_bubble.schedule.errors import Infeasible


def serve(connection: Connection) -> None:
    """Plan each step that arrives over a connection, until the other end closes the connection."""
    with suppress(EOFError):
        while True:
            problem = connection.recv()
            answer: StepPlan | Infeasible
            try:
                answer = problem.solve()
            except Infeasible as error:
                answer = error
            connection.send(answer)


if __name__ == "__main__":
    # The training process handles signals, and closes the connection when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
