"""The playground does what its reader wants, in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.browser.conftest import Playground
from tests.launch import ROOT

SIZE = ["--pipeline-size=4", "--num-microbatches=8", "--time-f=10", "--time-b=9", "--time-w=7", "--time-comm=0.3"]


def simulated(*flags: str) -> dict:
    """What the command line prints."""
    command = [sys.executable, "-m", "megatron.zero_bubble.cli", "schedule", "simulate", "--json", *flags]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def test_every_schedule_is_drawn_with_the_figures_of_the_command_line(playground: Playground):
    playground.open()
    select = playground.page.locator("[data-pane=a] select.name")
    names = list(select.locator("option").evaluate_all("all => all.filter(x => !x.disabled).map(x => x.value)"))
    assert len(names) == 12
    for name in names:
        before = playground.num_drawn
        select.select_option(name)
        playground.wait_for_drawing(before)
        expected = simulated(f"--schedule={name}", *SIZE)
        shown = playground.figures("a")
        assert shown["Bubble"] == percent(expected["bubble_rate"]), name
        assert shown["Iteration"] == f"{expected['iteration_time']:.4g} ms", name
        assert shown["Peak memory"] == f"{max(expected['peak_memory']):.4g} M_B", name
        assert shown["Messages"] == str(expected["num_messages"]), name
