"""Least squares without negative entries."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.zero_bubble.runtime.least_squares import nonnegative_least_squares


def test_a_solution_without_negative_entries_is_that_of_least_squares():
    assert nonnegative_least_squares(np.array([[1.0, 0], [0, 2]]), np.array([3.0, 4])) == pytest.approx([3, 2])


def test_an_entry_that_would_be_negative_is_zero_and_the_others_make_up_for_it():
    matrix, values = np.array([[1.0, 1], [1, 2], [1, 3]]), np.array([3.0, 2, 1])
    assert nonnegative_least_squares(matrix, values) == pytest.approx([2, 0])


def test_an_unknown_in_no_equation_is_zero():
    assert nonnegative_least_squares(np.array([[2.0, 0]]), np.array([4.0])) == pytest.approx([2, 0])
    assert nonnegative_least_squares(np.array([[1.0]]), np.array([-4.0])) == pytest.approx([0])
