"""Takes pictures of the playground at three widths, light and dark: `make screenshots`.

All go to build/screenshots, to be looked at; docs/playground has those that the documentation shows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from benchmarks.playground_times import chromium_options, served
from tests.browser.opened_page import Playground
from tests.launch import ROOT

_FOLDER = ROOT / "build" / "screenshots"
_SHOWN = {"1440.light.playing": "page.png", "390.dark": "narrow.png"}
"""Pictures that the documentation shows, with their names there."""
_PAPER = (
    "#pipeline-size=8&num-microbatches=24&time-f=29.718&time-b=29.444&time-w=19.927&time-comm=0.527"
    "&a.schedule=zb-v&b.schedule=auto&b.memory-limit=12"
)


def main() -> None:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with served() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(**chromium_options())
        for width, height in ((1440, 900), (900, 1200), (390, 844)):
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,
                    device_scale_factor=2 if width < 500 else 1,
                )
                playground = Playground(context.new_page(), address)
                playground.open()
                playground.wait_for_drawing(0, 2)
                _take(playground.page, f"{width}.{scheme}")
                _play(playground.page)
                _take(playground.page, f"{width}.{scheme}.playing")
                context.close()
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        playground = Playground(context.new_page(), address)
        playground.open(_PAPER)
        playground.wait_for_drawing(0, 2)
        playground.page.wait_for_selector("#plot .progress:empty", state="attached")
        _take(playground.page, "1440.paper", full_page=True)
        browser.close()


def _play(page: Page) -> None:
    """Put the playhead into the middle, and point at an operation."""
    page.locator("#transport input[type=range]").fill("405")
    canvas = page.locator("[data-pane=a] canvas")
    box = canvas.bounding_box()
    assert box is not None
    canvas.hover(position={"x": 46 + 0.28 * (box["width"] - 56), "y": 55})


def _take(page: Page, name: str, *, full_page: bool = False) -> None:
    path: Path = _FOLDER / f"{name}.png"
    page.screenshot(path=path, full_page=full_page)
    print(path.relative_to(ROOT), flush=True)
    if name in _SHOWN:
        shutil.copy(path, ROOT / "docs" / "playground" / _SHOWN[name])


if __name__ == "__main__":
    main()
