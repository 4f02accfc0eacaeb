"""Which replicas average after which iteration, and which levels make no hierarchy."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.schedule.hierarchy import Hierarchy, Level


def test_the_largest_group_whose_period_divides_the_iteration_averages():
    hierarchy = Hierarchy.parse("2:2,4:4,8:8")
    assert hierarchy.levels == (Level(2, 2), Level(4, 4), Level(8, 8))
    assert [hierarchy.group_size_after(iteration) for iteration in range(1, 9)] == [None, 2, None, 4, None, 2, None, 8]


def test_the_warm_up_averages_nothing():
    hierarchy = Hierarchy.parse("1:2,2:4", warmup=3)
    assert [hierarchy.is_local(iteration) for iteration in range(1, 6)] == [False, False, False, True, True]
    assert [hierarchy.group_size_after(iteration) for iteration in range(1, 6)] == [None, None, None, 4, 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "give PERIOD:SIZE,PERIOD:SIZE,..., as in 2:2,4:4,8:8"),
        ("2", "give PERIOD:SIZE,PERIOD:SIZE,..., as in 2:2,4:4,8:8"),
        ("2:2,", "give PERIOD:SIZE,PERIOD:SIZE,..., as in 2:2,4:4,8:8"),
        ("2:-2", "give PERIOD:SIZE,PERIOD:SIZE,..., as in 2:2,4:4,8:8"),
        ("0:2,4:4", "period 0 is too short: use at least 1 iteration"),
        ("2:1,4:4", "groups of 1 average nothing: use groups of at least 2 replicas"),
        ("4:2,4:4", "period 4 comes after 4: periods must increase with the groups"),
        ("4:2,2:4", "period 2 comes after 4: periods must increase with the groups"),
        (
            "2:2,4:2",
            "groups of 2 do not consist of whole groups of 2: each size must be a multiple of the previous size, and "
            "larger",
        ),
        (
            "2:4,4:6",
            "groups of 6 do not consist of whole groups of 4: each size must be a multiple of the previous size, and "
            "larger",
        ),
    ],
)
def test_levels_that_make_no_hierarchy_are_refused(text, reason):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Hierarchy.parse(text)
    assert str(error.value) == reason
