"""How far a training has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """The iterations and sequences that a training has behind it, those before it was resumed included."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
