"""Opens the playground in a headless Chromium, for tests, pictures and timings."""

from __future__ import annotations

import contextlib
import io
import json
import time
from typing import Any

from playwright.sync_api import Locator, Page

from megatron.zero_bubble.cli import schedule_command
from megatron.zero_bubble.schedule import StageCosts

PATIENCE = 120.0
"""Seconds to wait for anything: a machine that does other work too is slow."""


SIZE = ["--pipeline-size=4", "--num-microbatches=8"]
TIMES = ["--time-f=10", "--time-b=9", "--time-w=7", "--time-comm=0.3"]
COSTS = StageCosts.uniform(4, 10, 9, 7, 0.3)
"""The costs that these flags, and the page as it begins, stand for."""


def printed(command: str, *flags: str) -> Any:
    """What `zero-bubble schedule` prints as JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert schedule_command.main([command, "--json", *flags]) == 0
    return json.loads(out.getvalue())


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


class Playground:
    """One open page; `problems` are the errors that it reported, `requests` the addresses that it asked for."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE * 1000)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.context.on("request", lambda request: self.requests.append(request.url))

    def open(self, fragment: str = "") -> None:
        """Show the state of a fragment: by loading the page, or if it is there, by following the address."""
        if not self.page.url.startswith(self.address):
            self.page.goto(f"{self.address}{fragment}")
            self.page.wait_for_selector("html[data-drawn]")
            return
        before = self.num_drawn
        self.page.evaluate(
            "to => { history.replaceState(null, '', location.pathname + to); dispatchEvent(new Event('hashchange')); }",
            fragment,
        )
        self.wait_for_drawing(before, self.page.locator(".pane").count())

    def steps_of_worker(self) -> list[str]:
        """What the page's Python has done since it began to load."""
        names: list[str] = self.page.workers[0].evaluate("performance.getEntriesByType('mark').map(mark => mark.name)")
        return names

    @property
    def num_drawn(self) -> int:
        return int(self.page.locator("html").get_attribute("data-drawn") or 0)

    def wait_for_drawing(self, before: int, more: int = 1) -> None:
        """Wait until the page has drawn `more` pictures than `before`."""
        end = time.monotonic() + PATIENCE
        while self.num_drawn < before + more:
            assert time.monotonic() < end, f"not drawn; errors: {self.problems}"
            time.sleep(0.01)

    def set(self, flag: str, value: str, pane: str | None = None) -> None:
        """Type a value into the field of a flag and wait for its drawing."""
        before = self.num_drawn
        self.field(flag, pane).fill(value)
        self.wait_for_drawing(before, self.page.locator(".pane").count() if pane is None else 1)

    def field(self, flag: str, pane: str | None = None) -> Locator:
        place = "aside" if pane is None else f"[data-pane={pane}]"
        return self.page.locator(f"{place} [data-flag={flag}] :is(input:not([type=range]), select)").first

    def figures(self, pane: str) -> dict[str, str]:
        rows = self.page.locator(f".pane[data-pane={pane}] .figures > div").all()
        return {row.locator("dt").inner_text(): row.locator("dd").inner_text() for row in rows}

    def message(self, flag: str) -> str:
        return self.page.locator(f"[data-flag={flag}] .message:visible").inner_text()
