"""Sizes that cannot work are refused at once; without the checks each of these is silent for minutes, or for ever."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import run_schedules
from megatron.zero_bubble.session import progress_lines
from megatron.zero_bubble.session.plans import choose_plan, make_schedules
from tests.checked_flags import checked, checked_job

HUGE = str(10**9)
PLANNED = {"--zero-bubble": None, "--global-batch-size": "16"}
LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--train-iters": str(10**30)}, f"--train-iters: {10**30} is beyond 64 bits"),
        ({"--global-batch-size": str(10**12)}, f"--global-batch-size {10**12} .*: {10**12 // 2} microbatches are too"),
        (
            {"--global-batch-size": str(10**12), "--rampup-batch-size": "2 2 1000"},
            f"--global-batch-size {10**12} .* --rampup-batch-size 2 2 1000: iterations of every size, .* too many",
        ),
        ({"--num-virtual-stages-per-pipeline-rank": HUGE}, f"{HUGE} x .* more stages than --num-layers 8"),
        ({LAYOUT: f"Et*{HUGE}|L"}, f"repeats something {HUGE} times: at most 10000"),
        ({LAYOUT: f"E(t|)*{'9' * 5000}L"}, "repeats something 9+ times: at most 10000"),
        ({"--seed": "4294967296"}, r"--seed must be at most \d+ on these ranks, got 4294967296"),
        ({"--distributed-timeout-minutes": str(10**15)}, "--distributed-timeout-minutes must be at most 1000000"),
        ({"--num-layers": str(10**12)}, "--num-layers must be at most 1000000"),
        ({"--zero-bubble-memory-limit": "1e308"}, "--zero-bubble-memory-limit: '1e308' is not a memory limit"),
    ],
)  # fmt: skip
def test_a_size_that_cannot_work(changes: dict[str, str | None], words: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked(PLANNED | changes)
    assert re.search(words, str(error.value))
    assert time.monotonic() - start < 5


def test_planning_that_takes_long_is_announced_by_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = checked_job(PLANNED).flags
    slow = run_schedules.schedule_of
    monkeypatch.setattr(run_schedules, "schedule_of", lambda request: (time.sleep(0.2), slow(request))[1])
    for seconds, rank, said in (
        (5.0, 0, ""),
        (0.0, 1, ""),
        (0.0, 0, " > planning schedule auto for 8 microbatches ...\n"),
    ):
        monkeypatch.setattr(progress_lines, "SILENT_SECONDS", seconds)
        asked = replace(flags, rank=rank)
        make_schedules(asked, choose_plan(asked))
        assert capsys.readouterr().out == said
