"""Drawings, tables and plots of the playground have the figures of the command line, in a real browser."""

from __future__ import annotations

import re
import time

import pytest

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


def test_units_and_curves_are_explained_where_they_stand(playground: Playground):
    pane = playground.page.locator("[data-pane=b]")
    legend = pane.get_by_label("Curves of memory").inner_text()
    assert [f"rank {rank}" in legend for rank in range(4)] == [True] * 4
    unit = "M_B is the memory that one microbatch holds on a whole rank between F and B."
    assert unit in legend
    assert unit in playground.page.locator("#plot .hint").inner_text()
    assert "Share of the whole iteration" in pane.locator(".causes .hint").inner_text()


def test_a_limit_of_another_schedule_is_not_drawn(playground: Playground):
    drawn = []
    for fragment in ("", "&a.memory-limit=3"):
        playground.open(f"#pipeline-size=4&num-microbatches=8&a.schedule=1f1b{fragment}")
        drawn.append(playground.page.locator("[data-pane=a] canvas").evaluate("canvas => canvas.toDataURL()"))
    assert drawn[0] == drawn[1]


def test_a_schedule_with_much_memory_is_on_the_plot(playground: Playground):
    playground.open("#pipeline-size=4&num-microbatches=64&a.schedule=gpipe&b.schedule=auto")
    mark = playground.page.locator("#plot .mark.a").bounding_box()
    frame = playground.page.locator("#plot svg").bounding_box()
    assert mark is not None
    assert frame is not None
    assert mark["x"] + mark["width"] <= frame["x"] + frame["width"]


def test_a_shorter_schedule_fills_an_enlarged_drawing(playground: Playground):
    page = playground.page
    page.locator("[data-pane=a] canvas").focus()
    page.keyboard.press("Home")
    page.keyboard.press("+")
    for flag in ("time-f", "time-b", "time-w", "time-comm"):
        playground.set(flag, "1")
    canvas = page.locator("[data-pane=a] canvas")
    box = canvas.bounding_box()
    assert box is not None
    canvas.hover(position={"x": box["width"] - 14, "y": 21})
    assert "BW7" in page.locator("#tip").inner_text()
    page.keyboard.press("0")


def test_a_drawing_may_have_a_million_operations(playground: Playground):
    code = """async () => {
        const { greatest, least } = await import('./dom.js');
        const times = Array.from({ length: 10 ** 6 }, (_, k) => k);
        return [least(times), greatest(times)];
    }"""
    assert playground.page.evaluate(code) == [0, 10**6 - 1]
