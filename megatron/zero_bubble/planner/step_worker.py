"""A process that plans steps while another one trains, and ends with it.

It receives a `StepProblem` over the connection whose file descriptor is its argument, and sends its `StepPlan` or
`Infeasible` back.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from megatron.zero_bubble.planner.step_plan import StepPlan
from megatron.zero_bubble.schedule.errors import Infeasible


def serve(connection: Connection) -> None:
    """Answer problems until the other end is closed."""
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
    # The training process decides what a signal to both of them means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
