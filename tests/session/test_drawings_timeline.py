"""The iterations that a job draws."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.session import drawings
from megatron.zero_bubble.session.aliases import DEFAULT_WINDOW
from tests.checked_flags import checked_job

DRAWN = {"--zero-bubble": None, "--zero-bubble-timeline": "drawings"}


@pytest.mark.parametrize("start", [0, 100])
def test_by_default_the_two_iterations_after_the_profile_of_this_job_are_drawn(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawings, "TimelineWriter", lambda folder, first, last, *others: (first, last))

    def drawn(**flags: str | None) -> object:
        return drawings.open_timeline(checked_job({**DRAWN, **flags}).flags, None, start)  # type: ignore[arg-type]

    profiled = DEFAULT_WINDOW[1]
    assert drawn() == (start + profiled + 1, start + profiled + 2)
    assert drawn(**{"--zero-bubble-profile-iters": "0 0"}) == (start + 2, start + 3)
    assert drawn(**{"--zero-bubble-timeline-iters": "3 5"}) == (3, 5)
