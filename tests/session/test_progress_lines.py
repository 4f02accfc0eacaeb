"""Lines about how far a search is."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.session.progress_lines import SILENT_SECONDS, ProgressLines


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_short_search_says_nothing(clock):
    said: list[str] = []
    report = ProgressLines(said.append)
    for number in range(50):
        clock[0] += SILENT_SECONDS / 51
        report(f"{number} layouts")
    assert said == []


def test_a_long_search_says_a_line_every_two_seconds(clock):
    said: list[str] = []
    report = ProgressLines(said.append)
    for number in range(100):
        clock[0] += 0.11
        report(f"{number} layouts")
    assert said == ["18 layouts", "37 layouts", "56 layouts", "75 layouts", "94 layouts"]
