"""Measures how soon the playground shows a drawing, in a headless Chromium: `python -m benchmarks.playground_times`.

The benchmark loads the page with its default settings, whose drawings are part of the page, and from links with other
settings, whose drawings Python in the browser first computes. The benchmark then changes one number at a time with
eight ranks and 32 microbatches, and also changes the memory limit of `auto`. A time is from the change to the drawing
on the page. If planning takes long, the page first draws a provisional plan; the table then also has the time until the
complete plan is drawn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Page, sync_playwright

from megatron.zero_bubble.cli.output import table

CHROMIUM = shutil.which("chromium")

_STATE = (
    "#pipeline-size=8&num-microbatches=32&time-f=10&time-b=9&time-w=7&time-comm=0.3&a.schedule={}&a.memory-limit={}"
)
_CHANGE = """
async ([selector, value]) => {
  const field = document.querySelector(selector), {dataset} = document.documentElement;
  const before = {...dataset}, start = performance.now();
  const changed = async name => {
    while (dataset[name] === before[name]) await new Promise(requestAnimationFrame);
    return performance.now() - start;
  };
  field.value = value;
  field.dispatchEvent(new Event('input'));
  return Promise.all([changed('shown'), changed('drawn')]);
}
"""
_TIME, _LIMIT = "aside [data-flag=time-f] input", "[data-pane=a] [data-flag=memory-limit] input"


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve the page with `zero-bubble playground`, and yield its address."""
    command = [sys.executable, "-m", "megatron.zero_bubble.cli", "playground", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        words = server.stdout.readline().split()
        try:
            yield next(word for word in words if word.startswith("http"))
        finally:
            server.terminate()


def chromium_options() -> dict[str, Any]:
    """Options for starting the system's Chromium; Chromium cannot use a sandbox as root."""
    return {"executable_path": CHROMIUM, "args": ["--no-sandbox"] if os.geteuid() == 0 else []}


def main() -> None:
    rows: list[tuple[str, ...]] = []
    with served() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(**chromium_options())
        page = browser.new_page()
        rows.append(("first drawing", _seconds(_loaded(page, address)), ""))
        page.close()
        for schedule, limit in (("zb-h1", ""), ("auto", 10), ("zb-v", 8)):
            page = browser.new_page()
            loaded = _loaded(page, address + _STATE.format(schedule, limit))
            page.wait_for_selector("html[data-drawn]")
            rows.append((f"first drawing of a link to {schedule}", _seconds(loaded), ""))
            page.wait_for_selector("#plot .progress:empty", state="attached")
            rows.append((f"{schedule}: another time of F", *_medians(page, _TIME, ["11", "12", "13", "14", "10"])))
            if limit:
                limits = ["9", "9.5", "10.5", "11", "12"]
                rows.append((f"{schedule}: another memory limit", *_medians(page, _LIMIT, limits)))
            page.close()
        browser.close()
    print(table(("p = 8, m = 32", "drawn", "whole plan drawn"), rows), end="")


def _loaded(page: Page, address: str) -> float:
    begin = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("html[data-shown]")
    return time.perf_counter() - begin


def _medians(page: Page, selector: str, values: list[str]) -> Iterator[str]:
    """Median times from a change to the first drawing, and to the drawing of the complete plan."""
    times = [page.evaluate(_CHANGE, [selector, value]) for value in values]
    return (_seconds(statistics.median(column) / 1000) for column in zip(*times, strict=True))


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


if __name__ == "__main__":
    main()
