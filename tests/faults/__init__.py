"""Single faults that are planted in the package to measure what the tests protect: `tests.faults.plant` does it.

Each is a mistake that a developer could make and a reviewer miss. They were chosen from the code, without a look at
its tests. A module of `tests.faults.parts` has those of one part of the project.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One change of one file."""

    name: str
    file: str
    """Relative to `megatron/zero_bubble`."""
    old: str
    """Text that occurs once in the file."""
    new: str
    """The text with the fault, which takes its place."""
    effect: str
    """The consequence for a user's training, plan or command."""
