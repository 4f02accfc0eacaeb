"""Ranks with different zero-bubble flags would wait for each other, or each run an own schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megatron.zero_bubble.session import same_flags
from megatron.zero_bubble.session.flags import ZeroBubbleFlags
from megatron.zero_bubble.session.same_flags import check_same_flags

FLAGS = ZeroBubbleFlags(zero_bubble_schedule="zb-h1", zero_bubble_profile_iters=[2, 3])


def check(**of_rank_1: Any) -> None:
    """Check the flags of two ranks, of which rank 1 has other values of some flags."""

    def from_all_ranks(own: dict[str, Any]) -> list[dict[str, Any]]:
        other = replace(FLAGS, **of_rank_1)
        return [own, {name: getattr(other, name) for name in own}]

    with mock.patch.object(same_flags, "from_all_ranks", from_all_ranks):
        check_same_flags(FLAGS)


@pytest.mark.parametrize(
    ("of_rank_1", "line"),
    [
        ({"zero_bubble_schedule": "zb-h2"}, "--zero-bubble-schedule: rank 0 has zb-h1, rank 1 has zb-h2: "),
        ({"zero_bubble_profile_iters": [3, 4]}, "--zero-bubble-profile-iters: rank 0 has 2 3, rank 1 has 3 4: "),
        (
            {"zero_bubble_post_validation": True},
            "--zero-bubble-post-validation: rank 0 has no flag, rank 1 has the flag: ",
        ),
        ({"zero_bubble_memory_limit": "1.5"}, "--zero-bubble-memory-limit: rank 0 has no flag, rank 1 has 1.5: "),
    ],
)
def test_a_flag_that_differs_is_named_with_both_values(of_rank_1: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared below)
        check(**of_rank_1)
    assert str(error.value) == f"{line}give all ranks the same flags"


def test_files_may_have_other_names_on_other_nodes() -> None:
    check(zero_bubble_timeline="/scratch/1/timeline", zero_bubble_profile_output="/scratch/1/profile.json")
