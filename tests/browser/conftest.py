"""The playground in a headless Chromium: one page for all tests, each of which fails on any error on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright")

from benchmarks.playground_times import CHROMIUM, chromium_options, served  # noqa: E402
from megatron.zero_bubble.cli.playground.site_files import PYODIDE  # noqa: E402
from tests.browser.opened_page import Playground  # noqa: E402

if CHROMIUM is None:
    pytest.skip("there is no Chromium: apt-get install chromium", allow_module_level=True)
if not PYODIDE.is_dir():
    pytest.skip("Python for the browser is not there: make playground fetches it", allow_module_level=True)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with served() as address:
        yield address


@pytest.fixture(scope="session")
def chromium() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(**chromium_options())
        yield browser
        browser.close()


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
    shared.page.get_by_label("Time, by what may leave the device").uncheck()  # which no address holds
    yield shared
    assert shared.problems == []
    assert [url for url in shared.requests if not url.startswith((shared.address, "blob:", "data:"))] == []
