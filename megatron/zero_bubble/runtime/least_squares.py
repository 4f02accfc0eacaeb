"""Solves least-squares problems with non-negative solutions, to derive costs from measurements."""

from __future__ import annotations

import numpy as np


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Find a least-squares solution that has no negative entries.

    While the solution has a negative entry, the lowest entry is fixed at 0, and the problem is solved again.

    Args:
        matrix: coefficients of the equations, of shape [equations, unknowns].
        values: right-hand sides of the equations, of shape [equations].
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
