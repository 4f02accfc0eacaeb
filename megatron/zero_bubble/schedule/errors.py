"""Errors of schedules.

ValueError
└── ScheduleError            base class of all errors of schedules; the message is one line for the user
    ├── UnknownSchedule      no generator has the requested name
    ├── InvalidSchedule      an operation is missing, doubled, or in an impossible place
    │   └── Deadlock         some ranks wait for each other forever
    └── Infeasible           no schedule fits under the memory limit
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Context


class ScheduleError(ValueError):
    """The schedule, its costs, or the request for a schedule cannot be used."""


class UnknownSchedule(ScheduleError):
    """No generator has the requested name."""


class InvalidSchedule(ScheduleError):
    """The schedule is incomplete, has an operation twice, or breaks a dependency."""


class Deadlock(InvalidSchedule):
    """Some ranks of the schedule would wait for each other forever."""


class Infeasible(ScheduleError):
    """No schedule fits in the memory limit; `smallest_limit` is a memory limit that is enough.

    Attributes:
        of_ranks: rank -> memory limit that is enough for this rank; empty if only `smallest_limit` is known.
    """

    def __init__(self, message: str, smallest_limit: float, of_ranks: tuple[float, ...] = ()) -> None:
        # Errors are pickled to send them to other ranks. Pickling keeps only `args`, so the limits are in `args`.
        super().__init__(message, smallest_limit, of_ranks)
        self.smallest_limit = smallest_limit
        self.of_ranks = of_ranks

    def __str__(self) -> str:
        return str(self.args[0])


def enough(limit: float) -> str:
    """Return text with a memory limit that is enough: six digits of `limit`, rounded up, unless they are exact."""
    digits = Context(prec=6, rounding=ROUND_CEILING).create_decimal_from_float(limit * (1 - 1e-10))
    return f"{float(digits):g} is enough"


def one_line(error: BaseException) -> str:
    """The message of an error as one line."""
    return " ".join(str(error).split())
