"""How far a training has come, and the error that ends it early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """The iterations and sequences that a training has behind it, those before it was resumed included."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0


class TrainingError(ValueError):
    """The training cannot go on; the message is one line that tells the user why."""
