"""The playground in a headless Chromium: its files, served by the command, and a page that fails on any error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megatron.zero_bubble.cli.playground.site_files import PYODIDE
from tests.launch import ROOT

playwright = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no Chromium: apt-get install chromium", allow_module_level=True)
if not PYODIDE.is_dir():
    pytest.skip("Python for the browser is not there: make playground fetches it", allow_module_level=True)

PATIENCE = 120.0
"""Seconds to wait for anything: a machine that does other work too is slow."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where `zero-bubble playground` serves the page."""
    command = [sys.executable, "-m", "megatron.zero_bubble.cli", "playground", "--no-browser"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        words = server.stdout.readline().split()
        yield next(word for word in words if word.startswith("http"))
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130


@pytest.fixture(scope="session")
def chromium() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


class Playground:
    """One open page; `problems` are the errors that it reported, `requests` the addresses that it asked for."""

    def __init__(self, page: playwright.Page, address: str) -> None:
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

    def field(self, flag: str, pane: str | None = None) -> playwright.Locator:
        place = "aside" if pane is None else f"[data-pane={pane}]"
        return self.page.locator(f"{place} [data-flag={flag}] :is(input:not([type=range]), select)").first

    def figures(self, pane: str) -> dict[str, str]:
        rows = self.page.locator(f".pane[data-pane={pane}] .figures > div").all()
        return {row.locator("dt").inner_text(): row.locator("dd").inner_text() for row in rows}

    def message(self, flag: str) -> str:
        return self.page.locator(f"[data-flag={flag}] .message:visible").inner_text()


@pytest.fixture(scope="session")
def shared(chromium: playwright.Browser, address: str) -> Playground:
    """One page for all tests, because Python takes seconds to load."""
    context = chromium.new_context(
        viewport={"width": 1440, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    return Playground(context.new_page(), address)


@pytest.fixture
def playground(shared: Playground) -> Iterator[Playground]:
    """The page as it begins. When the test is over it has had no errors, and has asked nobody but its own server."""
    shared.open()
    yield shared
    assert shared.problems == []
    assert [url for url in shared.requests if not url.startswith((shared.address, "blob:", "data:"))] == []
