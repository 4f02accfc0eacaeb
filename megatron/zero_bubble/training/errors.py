"""What ends a training that had begun, beside defects of the program."""

from __future__ import annotations


class TrainingError(ValueError):
    """The training cannot go on; the message is one line that tells the user why."""
