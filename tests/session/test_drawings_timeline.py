"""The iterations that a job draws."""

from __future__ import annotations

from dataclasses import replace

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
    told: list[str] = []
    monkeypatch.setattr(drawings, "print_rank_0", told.append)

    def drawn(**flags: str | None) -> object:
        return drawings.open_timeline(checked_job({**DRAWN, **flags}).flags, None, start)  # type: ignore[arg-type]

    profiled = DEFAULT_WINDOW[1]
    assert drawn() == (start + profiled + 1, start + profiled + 2)
    assert drawn(**{"--zero-bubble-profile-iters": "0 0"}) == (start + 2, start + 3)
    planned = replace(checked_job(DRAWN).flags, zero_bubble_profile_input="profile.json")
    assert drawings.open_timeline(planned, None, start) == (start + 2, start + 3)  # type: ignore[arg-type]
    assert told == []
    given = {"--zero-bubble-timeline-iters": "3 5", "--train-iters": "110"}
    assert drawn(**given) == (3, 5)
    nothing = " > --zero-bubble-timeline-iters {}: nothing is drawn, this job runs iterations 101 to 110"
    assert told == ([] if start == 0 else [nothing.format("3 5")])
    told.clear()
    assert drawn(**{**given, "--zero-bubble-timeline-iters": "50 60", "--exit-interval": "20"}) == (50, 60)
    assert [line.split("runs")[1] for line in told] == [
        " iterations 1 to 20" if start == 0 else " iterations 101 to 110"
    ]


def test_iterations_to_draw_need_a_folder() -> None:
    with pytest.raises(ValueError, match=r"^--zero-bubble-timeline-iters 3 5 needs --zero-bubble-timeline FOLDER$"):
        checked_job({"--zero-bubble": None, "--zero-bubble-timeline-iters": "3 5"})
