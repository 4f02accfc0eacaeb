"""A step of post-validation waits where the steps before it were often wrong."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.runtime.recent_steps import RecentSteps


@pytest.mark.parametrize(
    ("wrong", "waits"),
    [
        ("", False),
        ("x", False),
        ("x.", False),
        ("xx", True),
        ("x..x", True),
        ("x...x", False),
        ("xxxx...", False),
        ("xxxx..", True),
    ],
)
def test_a_step_waits_if_two_of_the_last_four_were_wrong(wrong: str, waits: bool) -> None:
    recent = RecentSteps()
    for step in wrong:
        recent.record(step == "x")
    assert recent.next_waits is waits
