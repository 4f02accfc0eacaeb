"""The playground does what its reader wants, in a real browser."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from megatron.zero_bubble.cli.playground.site_files import PYODIDE, write_site
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import simulate
from tests.browser.opened_page import COSTS, PATIENCE, SIZE, TIMES, Playground, percent, printed


def test_every_schedule_is_drawn_with_the_figures_of_the_command_line(playground: Playground):
    for name, entry in ENTRIES.items():
        option = playground.page.locator(f"[data-pane=a] select.name option[value='{name}']")
        assert option.is_disabled() is entry.is_slow
        if entry.is_slow:
            continue
        before = playground.num_drawn
        playground.page.locator("[data-pane=a] select.name").select_option(name)
        playground.wait_for_drawing(before)
        expected = printed("simulate", f"--schedule={name}", *SIZE, *TIMES)
        shown = playground.figures("a")
        assert shown["Bubble"] == percent(expected["bubble_rate"]), name
        assert shown["Iteration"] == f"{expected['iteration_time']:.4g} ms", name
        assert shown["Peak memory"] == f"{max(expected['peak_memory']):.4g} M_B", name
        assert shown["Messages"] == str(expected["num_messages"]), name


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


def test_a_slow_plan_is_drawn_twice(playground: Playground):
    """First as it is found with little effort, then whole, with the figures of the command line."""
    flags = ["--pipeline-size=8", "--num-microbatches=64", *TIMES]
    before = playground.num_drawn
    fragment = f"{'&'.join(flag.removeprefix('--') for flag in flags)}&a.schedule=zb-v&a.memory-limit=9"
    playground.page.evaluate("fragment => { location.hash = fragment; }", fragment)
    playground.page.wait_for_selector("[data-pane=a].draft .drafted:text-is('first plan …')")
    draft = playground.figures("a")["Bubble"]
    playground.wait_for_drawing(before)
    assert playground.page.locator(".draft").count() == 0
    whole = printed("simulate", "--schedule=zb-v", "--memory-limit=9", *flags)["bubble_rate"]
    assert playground.figures("a")["Bubble"] == percent(whole)
    assert float(draft.rstrip("%")) > 100 * whole


def test_the_causes_of_idle_time_are_those_of_the_command_line(playground: Playground):
    expected = printed("simulate", "--schedule=1f1b", *SIZE, *TIMES)["bubble"]
    playground.page.locator("[data-pane=a] .causes summary").click()
    table = playground.page.locator("[data-pane=a] .causes table")
    heads = table.locator("thead th").all_inner_texts()
    assert heads == ["rank", "warmup", "waiting for F", "waiting for B", "communication", "tail"]
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    fields = ("warmup", "waiting_for_forward", "waiting_for_backward", "communication", "tail")
    assert [[float(cell) for cell in row] for row in rows] == [
        [pytest.approx(bubble[field], abs=0.05) for field in fields] for bubble in expected
    ]


def test_pointing_at_an_operation_tells_its_times_and_what_it_waits_for(playground: Playground):
    canvas = playground.page.locator("[data-pane=a] canvas")
    box = canvas.bounding_box()
    assert box is not None
    timeline = simulate(generate("1f1b", 4, 8), COSTS)
    other = simulate(generate("auto", 4, 8, costs=COSTS, memory_limit=6), COSTS)
    longest = max(timeline.makespan, other.makespan)

    def point(pane: str, rank: int, time: float) -> str:
        place = playground.page.locator(f"[data-pane={pane}] canvas")
        place.hover(position={"x": 46 + time / longest * (box["width"] - 56), "y": 4 + 36 * rank + 17})
        return playground.page.locator("#tip").inner_text()

    backward = next(timed for timed in timeline.lanes[1] if str(timed.op) == "BW0")
    words = point("a", 1, backward.start + 1)
    assert words.startswith("BW0")
    assert "rank 1, stage 1" in words
    assert f"{backward.start:.4g} to {backward.end:.4g} ms" in words
    assert re.search(rf"BW0 of rank 2\s+{backward.start:.4g}", words)
    idle = timeline.lanes[0][4].start - timeline.lanes[0][3].end
    assert " ".join(point("a", 0, 60).split()) == f"Idle waiting for B {idle:.4g} ms"
    # Both drawings have one scale: the same place is the same time.
    [under] = [timed for timed in other.lanes[1] if timed.start <= backward.start + 1 < timed.end]
    assert point("b", 1, backward.start + 1).startswith(str(under.op))


def test_keys_walk_through_a_drawing_and_play_it(playground: Playground):
    page = playground.page
    page.locator("[data-pane=a] canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip h3").inner_text().startswith("F0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "rank 1" in page.locator("#spoken").text_content()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.keyboard.press("Home")
    assert page.locator("#transport output").inner_text() == "0"
    page.keyboard.press("Space")
    page.wait_for_selector("#transport .playing")
    deadline = time.monotonic() + PATIENCE
    while float(page.locator("#transport output").inner_text()) <= 1:
        assert time.monotonic() < deadline
    page.keyboard.press("Space")
    assert page.locator("#transport .playing").count() == 0
    page.keyboard.press("End")
    page.keyboard.press("+")
    page.keyboard.press("0")


def test_the_limit_is_dragged_on_the_plot(playground: Playground):
    page = playground.page
    handle = page.locator("#plot .handle.b")
    page.locator("#plot svg").scroll_into_view_if_needed()
    box = handle.locator(".mark").bounding_box()
    frame = page.locator("#plot svg").bounding_box()
    assert box is not None
    assert frame is not None
    before = playground.num_drawn
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - (frame["width"] - 68) / 10 * 2, y, steps=4)
    page.mouse.up()
    assert playground.field("memory-limit", "b").input_value() == "4"
    playground.wait_for_drawing(before)
    page.wait_for_selector("[data-pane=b]:not(.busy)")
    expected = printed("simulate", "--schedule=auto", "--memory-limit=4", *SIZE, *TIMES)
    page.wait_for_selector(f"[data-pane=b] .figures dd:text-is('{percent(expected['bubble_rate'])}')")
    page.keyboard.press("ArrowRight")
    assert playground.field("memory-limit", "b").input_value() == "4.25"


def test_the_plot_has_the_points_of_memory_curve(playground: Playground):
    page = playground.page
    rows = printed("memory-curve", "--schedule=auto", "--from=1.5", "--to=2.5", "--step=0.5", *SIZE, *TIMES)
    page.wait_for_selector("#plot .progress:empty", state="attached")
    titles = page.locator("#plot .point.b title").all_text_contents()
    assert len(titles) > 10
    for row in rows:
        assert f"auto: {percent(row['lost'])} under {row['memory_limit']:g} M_B" in titles


def test_the_dial_has_the_times_of_memory_curve(playground: Playground):
    page = playground.page
    playground.set("time-d", "5")
    page.get_by_label("Time, by what may leave the device").check()
    limits = ("--from=0.625", "--to=2.125", "--step=0.5")  # among those that are computed first
    rows = printed("memory-curve", "--dial", "--schedule=auto", "--time-d=5", *limits, *SIZE, *TIMES)
    shortest = min(row["iteration_time"] for row in rows if row["iteration_time"])
    for way, words in {"offload": "copy to the host", "both": "both"}.items():
        for row in rows:
            if row["way"] == way:
                time, limit = row["iteration_time"] / shortest, row["memory_limit"]
                title = f"{words}: {time:.3f} times as long under {limit:g} M_B"
                page.locator(f"#plot .point.{way} title", has_text=title).wait_for(state="attached")


def test_one_schedule_can_be_removed_and_another_compared(playground: Playground):
    page = playground.page
    page.get_by_role("button", name="Remove schedule B").click()
    assert page.locator(".pane").count() == 1
    before = playground.num_drawn
    page.get_by_role("button", name="Compare with another schedule").click()
    playground.wait_for_drawing(before, 2)
    page.wait_for_selector("[data-pane=b] .figures dd")
    assert set(playground.figures("b")) == set(playground.figures("a"))


def test_a_value_for_each_rank_is_a_list_with_a_slider_each(playground: Playground):
    page = playground.page
    before = playground.num_drawn
    page.get_by_role("button", name="Forward: one value for each rank").first.click()
    assert playground.field("time-f").input_value() == "10,10,10,10"
    playground.wait_for_drawing(before, 2)
    before = playground.num_drawn
    page.get_by_label("Forward, rank 2").first.fill("15")
    playground.wait_for_drawing(before, 2)
    expected = printed("simulate", "--schedule=1f1b", *SIZE, "--time-f=10,10,15,10", *TIMES[1:])
    assert playground.figures("a")["Imbalance"] == percent(expected["imbalance"])
    playground.set("pipeline-size", "6")
    assert playground.field("time-f").input_value() == "10,10,15,10,10,10"


@pytest.mark.parametrize(
    ("flag", "pane", "value", "words"),
    [
        ("time-f", None, "ten", "expected a number, got 'ten'"),
        ("num-microbatches", None, "0", "must be at least 1, got 0"),
        ("memory-limit", "b", "0.5", "is enough for every rank"),
    ],
)
def test_a_mistake_gives_one_message_beside_its_field(playground: Playground, flag, pane, value, words):
    page = playground.page
    right = playground.field(flag, pane).input_value()
    playground.field(flag, pane).fill(value)
    message = page.locator(f"[data-flag={flag}] .message:visible")
    message.first.wait_for()
    assert words in message.first.inner_text()
    assert page.locator(".message:visible").count() == 1
    assert playground.field(flag, pane).get_attribute("aria-invalid") == "true"
    playground.set(flag, right, pane)
    page.wait_for_selector(".message:visible", state="hidden")


def test_a_mistake_that_was_taken_back_is_not_answered(playground: Playground):
    page, field = playground.page, playground.field("num-microbatches")
    right = field.input_value()
    field.fill("0")
    field.fill(right)
    with page.expect_download():
        page.locator("[data-pane=a] .save").select_option("json")
    assert page.locator(".message:visible").count() == 0, "Python answers in order: the file came after the mistake"


def test_only_the_newest_of_many_changes_is_drawn(playground: Playground):
    for number in range(8, 25):
        playground.field("num-microbatches").fill(str(number))
    expected = printed("simulate", "--schedule=1f1b", "--pipeline-size=4", "--num-microbatches=24", *TIMES)
    before = playground.num_drawn
    playground.page.wait_for_selector(f"[data-pane=a] dd:text-is('{percent(expected['bubble_rate'])}')")
    playground.page.wait_for_selector(".pane.busy", state="detached")
    assert playground.num_drawn - before <= 4, "not one drawing for each change"


def test_a_long_computation_that_nobody_waits_for_any_more_is_ended(playground: Playground):
    page = playground.page
    # Python answers one question at a time: the long computation starts at once only after the points of the plot.
    page.wait_for_selector("#plot .progress:empty", state="attached")
    started: list[str] = []
    page.on("worker", lambda worker: started.append(worker.url))
    fragment = f"#pipeline-size=32&num-microbatches=1024&{'&'.join(flag.removeprefix('--') for flag in TIMES)}"
    page.evaluate("fragment => { location.hash = fragment; }", f"{fragment}&a.schedule=v-min")
    page.wait_for_selector(".pane.busy")
    playground.field("pipeline-size").fill("4")
    playground.field("num-microbatches").fill("8")
    expected = printed("simulate", "--schedule=v-min", *SIZE, *TIMES)
    page.wait_for_selector(f".figures dd:text-is('{percent(expected['bubble_rate'])}')")
    assert started, "another worker took the place of the one that was busy"


@pytest.mark.parametrize("width", [390, 900, 1440])
def test_nothing_is_wider_than_the_screen(playground: Playground, width: int):
    playground.page.set_viewport_size({"width": width, "height": 900})
    for fragment in ("", "#pipeline-size=8&num-microbatches=16&a.schedule=auto&a.post-validation=true&b.schedule=zb-v"):
        playground.open(fragment)
        assert playground.page.evaluate("() => document.documentElement.scrollWidth") == width
        assert playground.page.locator("[data-pane=b] canvas").evaluate("x => x.getBoundingClientRect().right") < width
    playground.page.set_viewport_size({"width": 1440, "height": 900})


def test_the_theme_follows_the_system_until_it_is_chosen(playground: Playground):
    page = playground.page

    def ground() -> str:
        return page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")

    page.emulate_media(color_scheme="light")
    light = ground()
    page.emulate_media(color_scheme="dark")
    assert ground() != light
    page.get_by_role("button", name="Light or dark").click()
    assert ground() == light
    page.evaluate("() => localStorage.clear()")
    page.evaluate("() => delete document.documentElement.dataset.theme")
    page.emulate_media(color_scheme="light")


def test_a_damaged_link_says_so(playground: Playground):
    playground.page.evaluate(
        "() => { history.replaceState(null, '', '#b.input=x&file.x=%%'); dispatchEvent(new Event('hashchange')); }"
    )
    playground.page.wait_for_selector("#notice:visible")
    assert playground.page.locator("#notice").inner_text() == (
        "This link is damaged, so the page shows what it begins with."
    )
    playground.open()
    playground.page.wait_for_selector("#notice", state="hidden")


def test_a_link_with_unknown_settings_shows_what_it_knows(playground: Playground):
    page = playground.page
    try:
        page.goto(f"{playground.address}#pipeline-size=3&num-microbatches=6&xyz=1&a.schedule=zb-h1")
        page.reload()
        page.wait_for_selector("html[data-drawn]")
        assert page.locator("#notice").inner_text() == (
            "This link has settings that the page does not know and leaves out: xyz."
        )
        assert page.locator(".message:visible").count() == 0
    finally:
        page.goto("about:blank")
        playground.open()


@pytest.mark.parametrize("width", [1400, 1440, 900])
def test_the_buttons_of_a_schedule_stand_in_one_row(playground: Playground, width: int):
    """However many fields the schedule has."""
    page = playground.page
    size = page.viewport_size
    page.set_viewport_size({"width": width, "height": 900})
    tops = [
        box["y"]
        for name in ("More", "Remove schedule B")
        if (box := page.locator("[data-pane=b] header").get_by_role("button", name=name).bounding_box())
    ]
    assert len(tops) == 2
    assert abs(tops[0] - tops[1]) < 6
    page.set_viewport_size(size)


def test_units_and_curves_are_explained_where_they_stand(playground: Playground):
    pane = playground.page.locator("[data-pane=b]")
    legend = pane.get_by_label("Curves of memory").inner_text()
    assert [f"rank {rank}" in legend for rank in range(4)] == [True] * 4
    unit = "M_B is the memory that one microbatch holds on a whole rank between F and B."
    assert unit in legend
    assert unit in playground.page.locator("#plot .hint").inner_text()
    assert "Share of the whole iteration" in pane.locator(".causes .hint").inner_text()
