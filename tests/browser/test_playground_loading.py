"""Python starts in the browser from a snapshot of its memory or from its beginning, and Ctrl-C ends the server."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route

from benchmarks.playground_times import served
from megatron.zero_bubble.cli.playground.site_files import PYODIDE, write_site
from tests.browser.opened_page import SIZE, Playground, percent, printed


def test_python_starts_from_a_snapshot_of_its_memory(playground: Playground):
    playground.set("time-f", "11")
    assert "restored" in playground.steps_of_worker()


LARGE_SNAPSHOT = """
import { readFile, writeFile } from 'node:fs/promises';
import { gzipSync } from 'node:zlib';
const { startPython } = await import(process.cwd() + '/python.mjs');
const python = await startPython(new Uint8Array(await readFile('package.zip')), { _makeSnapshot: true });
python.runPython('block = bytearray(10**8)');
await writeFile('python.snapshot', gzipSync(python.makeMemorySnapshot()));
"""


def test_python_starts_from_a_snapshot_of_a_memory_that_grew(chromium: Browser, address: str, tmp_path: Path):
    write_site(tmp_path, PYODIDE)
    subprocess.run(["node", "--input-type=module", f"--eval={LARGE_SNAPSHOT}"], cwd=tmp_path, check=True)
    page = chromium.new_page()
    page.route("**/python.snapshot", lambda route: route.fulfill(path=tmp_path / "python.snapshot"))
    other = Playground(page, address)
    other.open("#pipeline-size=4&num-microbatches=8&a.schedule=zb-h1")
    assert "restored" in other.steps_of_worker()
    assert other.figures("a")["Bubble"] == percent(printed("simulate", "--schedule=zb-h1", *SIZE)["bubble_rate"])
    page.close()


def test_without_a_snapshot_python_starts_from_its_beginning(chromium: Browser, address: str):
    page = chromium.new_page()
    page.route("**/python.snapshot", lambda route: route.fulfill(body=b""))
    other = Playground(page, address)
    other.open("#pipeline-size=4&num-microbatches=8&a.schedule=zb-h1")
    assert "started" in other.steps_of_worker()
    assert "restored" not in other.steps_of_worker()
    assert other.figures("a")["Bubble"] == percent(printed("simulate", "--schedule=zb-h1", *SIZE)["bubble_rate"])
    assert other.problems == []
    page.close()


def test_ctrl_c_ends_the_server():
    command = [sys.executable, "-m", "megatron.zero_bubble.cli", "playground", "--no-browser"]
    # A job in the background of a shell would ignore Ctrl-C.
    takes_ctrl_c = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=takes_ctrl_c) as server:
        assert server.stdout is not None
        assert "http" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130


def test_changes_while_python_loads_do_not_load_it_again(chromium: Browser, address: str):
    page = chromium.new_page()
    loads: list[Route] = []

    def hold_first(route: Route) -> None:
        loads.append(route)
        if len(loads) > 1:
            route.continue_()

    page.route("**/package.zip", hold_first)
    other = Playground(page, address)
    other.open()
    before = other.num_drawn
    for value in ("11", "12"):
        other.field("time-f").fill(value)
    page.wait_for_timeout(2500)
    assert len(loads) == 1
    loads[0].continue_()
    other.wait_for_drawing(before, 2)
    page.wait_for_selector("#plot .point.b", state="attached")
    page.close()


def test_python_that_cannot_be_loaded_is_said(chromium: Browser, address: str):
    page = chromium.new_page()
    page.route("**/package.zip", lambda route: route.abort())
    other = Playground(page, address)
    other.open()
    other.field("time-f").fill("11")
    page.wait_for_selector("[data-pane=a] > .message:visible")
    assert page.locator("[data-pane=a] > .message").inner_text() == "Python failed: Failed to fetch"
    page.close()


def test_an_error_while_the_page_is_served_ends_the_server():
    with pytest.raises(ZeroDivisionError), served():
        raise ZeroDivisionError
