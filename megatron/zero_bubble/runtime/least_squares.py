"""Solves least-squares problems with non-negative solutions, to derive costs from measurements."""

from __future__ import annotations

import numpy as np


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Solve a least-squares problem; while an entry of the solution is negative, fix the lowest at 0 and repeat.

    Args:
        matrix: of shape [equations, unknowns].
        values: of shape [equations].
    """
    used = list(np.flatnonzero(matrix.any(axis=0)))
    solution = np.zeros(matrix.shape[1])
    while used:
        entries = np.linalg.lstsq(matrix[:, used], values, rcond=None)[0]
        if min(entries) >= 0:
            solution[used] = entries
            break
        used.pop(int(np.argmin(entries)))
    return solution
