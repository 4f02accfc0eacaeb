"""Partitions of layers have the smallest possible largest part."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from megatron.zero_bubble.pipeline.boundaries import balanced, given, matching


def all_partitions(num_layers: int, num_parts: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, num_layers) for cuts in combinations(range(1, num_layers), num_parts - 1)]


def parts(weights, boundaries) -> list[float]:
    return [sum(weights[first:end]) for first, end in pairwise(boundaries)]


def unevenness(weights, boundaries) -> tuple[float, float]:
    lengths = [end - first for first, end in pairwise(boundaries)]
    return sum(part**2 for part in parts(weights, boundaries)), sum(length**2 for length in lengths)


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_has_a_smaller_largest_part_and_none_as_good_is_more_even(seed):
    random = Random(seed)
    num_layers = random.randint(1, 9)
    weights = [random.choice([0, 0, 1, 2, 5, 40]) for _ in range(num_layers)]
    for num_parts in range(1, num_layers + 1):
        found = balanced(weights, num_parts)
        every = all_partitions(num_layers, num_parts)
        smallest = min(max(parts(weights, other)) for other in every)
        assert found in every
        assert max(parts(weights, found)) == smallest
        as_good = [other for other in every if max(parts(weights, other)) == smallest]
        assert unevenness(weights, found) == min(unevenness(weights, other) for other in as_good)


def test_weights_that_are_not_whole_numbers_are_balanced():
    weights = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    assert balanced(weights, 2) == (0, 3, 6)
    assert balanced(weights, 6) == (0, 1, 2, 3, 4, 5, 6)


def test_hundreds_of_layers_are_partitioned():
    found = balanced([k % 7 for k in range(300)], 16)
    assert max(parts([k % 7 for k in range(300)], found)) <= 60


def test_boundaries_of_the_user():
    assert given([3, 5], 8, 3) == (0, 3, 5, 8)


@pytest.mark.parametrize("boundaries", [[3], [5, 3], [0, 3], [3, 8], [3, 3]])
def test_boundaries_that_leave_a_stage_without_layers_are_refused(boundaries):
    with pytest.raises(ValueError, match=r"8 layers on 3 stages need 2 rising boundaries from 1 to 7"):
        given(boundaries, 8, 3)


def test_a_regular_expression_finds_classes_whatever_their_case():
    assert matching("^conv", ["Conv2d", "ReLU", "Conv2d", "Linear"]) == [1, 0, 1, 0]


def test_a_regular_expression_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"partition='type:Attention' matches no layer; their classes are Linear, ReLU"
    ):
        matching("Attention", ["Linear", "ReLU", "Linear"])
    with pytest.raises(ValueError, match=r"'type:\(': not a regular expression"):
        matching("(", ["Linear"])
