"""The progress of a training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """The iterations and sequences that a training has done, including those before it was resumed."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
