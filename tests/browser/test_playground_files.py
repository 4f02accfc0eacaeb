"""Files and links: what the playground opens, saves and shares, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.schedule.figures import forget_files
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts, lower, simulate, validate
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw import to_chrome_trace
from megatron.zero_bubble.schedule.formats import (
    Profile,
    costs_to_json,
    profile_to_json,
    schedule_from_json,
    schedule_from_pytorch_csv,
    schedule_to_json,
)
from tests.browser.opened_page import COSTS, SIZE, Playground, percent, printed


def test_saved_schedules_are_read_by_everyone(playground: Playground, tmp_path: Path):
    page, expected = playground.page, generate("1f1b", 4, 8)
    saved: dict[str, Path] = {}
    for kind in ("json", "csv", "svg", "png", "trace"):
        with page.expect_download() as download:
            page.locator("[data-pane=a] .save").select_option(kind)
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    assert [path.name for path in saved.values()] == [
        "1f1b.json",
        "1f1b.csv",
        "1f1b.svg",
        "1f1b.png",
        "1f1b.trace.json",
    ]
    assert schedule_from_json(saved["json"].read_text()) == expected
    validate(lower(schedule_from_json(saved["json"].read_text())))
    assert schedule_from_pytorch_csv(saved["csv"].read_bytes().decode(), "1f1b") == expected
    assert saved["svg"].read_text().startswith("<svg")
    assert saved["png"].read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(saved["trace"].read_text())["traceEvents"]) > 64


def test_a_profile_gives_the_costs(playground: Playground, tmp_path: Path):
    costs = StageCosts.uniform(4, 3.5, 3, 2, 0.1, 4e6, -2e6, -2e6)
    schedule = generate("zb-v", 2, 4)
    (tmp_path / "profile.json").write_text(profile_to_json(Profile(schedule.placement, costs, 0.01, {})))
    before = playground.num_drawn
    playground.page.set_input_files("#open", tmp_path / "profile.json")
    playground.wait_for_drawing(before)
    assert playground.page.locator(".file").inner_text().split()[:3] == ["Costs", "from", "profile.json"]
    assert playground.field("time-f").is_hidden()
    flags = ["--schedule=auto", "--pipeline-size=2", "--num-microbatches=8", "--num-chunks=2", "--placement=v"]
    expected = printed("simulate", *flags, f"--costs={tmp_path / 'profile.json'}")
    assert playground.figures("a")["Bubble"] == percent(expected["bubble_rate"])


def test_a_run_s_trace_is_dropped_and_compared_with_its_plan(playground: Playground):
    timeline = simulate(generate("zb-h1", 4, 8), COSTS)
    text = to_chrome_trace(timeline)
    data = playground.page.evaluate_handle(
        "text => { const data = new DataTransfer(); data.items.add(new File([text], 'run.trace.json')); return data; }",
        text,
    )
    before = playground.num_drawn
    playground.page.dispatch_event("body", "drop", {"dataTransfer": data})
    playground.wait_for_drawing(before, 2)
    assert playground.page.locator("[data-pane=a] strong.name").inner_text() == "run.trace.json"
    assert playground.figures("a")["Bubble"] == percent(timeline.bubble_rate)
    assert playground.figures("b")["Bubble"] != playground.figures("a")["Bubble"]
    # What each rank waited for, as it ran; nothing that a run does not have can be set.
    playground.page.locator("[data-pane=a] .causes summary").click()
    row = playground.page.locator("[data-pane=a] .causes tbody tr").nth(1).locator("td").all_inner_texts()
    assert [float(cell) for cell in row] == [pytest.approx(times[1], abs=0.05) for times in causes(timeline).values()]
    assert playground.page.locator("#settings details:visible").count() == 0
    assert playground.page.locator("#plot").is_hidden()
    before = playground.num_drawn
    playground.page.get_by_role("button", name="Close the file").first.click()
    playground.wait_for_drawing(before)
    assert playground.field("time-f").is_visible()


def test_what_cannot_be_opened_is_refused_in_words(playground: Playground, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("hello")
    playground.page.set_input_files("#open", tmp_path / "notes.txt")
    playground.page.wait_for_selector("#notice:visible")
    assert "'hello' is not an action" in playground.page.locator("#notice").inner_text()


def test_a_link_holds_everything_files_too(playground: Playground, tmp_path: Path):
    page = playground.page
    (tmp_path / "own.json").write_text(schedule_to_json(generate("zb-h2", 4, 8)))
    before = playground.num_drawn
    page.set_input_files("#open", tmp_path / "own.json")
    playground.wait_for_drawing(before, 2)
    playground.set("memory-limit", "6.5", "b")
    playground.set("time-w", "8,7,7,9")
    expected = [playground.figures(pane) for pane in "ab"]
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_selector("#share:text-is('Copied')")
    link = page.evaluate("() => navigator.clipboard.readText()")
    other = Playground(page.context.new_page(), playground.address)
    other.open(link.removeprefix(playground.address))
    other.wait_for_drawing(0, 2)
    assert [other.figures(pane) for pane in "ab"] == expected
    assert other.field("time-w").input_value() == "8,7,7,9"
    assert other.page.locator("[data-pane=a] strong.name").inner_text() == "own.json"
    other.page.close()
    assert other.problems == []


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
        page.goto(f"{playground.address}#pipeline-size=3&num-microbatches=6&xyz=1&a.schedule=zb-h1&a.uvw=2")
        page.reload()
        page.wait_for_selector("html[data-drawn]")
        assert page.locator("#notice").inner_text() == (
            "This link has settings that the page does not know and leaves out: xyz, a.uvw."
        )
        assert page.locator(".message:visible").count() == 0
    finally:
        page.goto("about:blank")
        playground.open()


def test_an_opened_schedule_fits_lists_to_its_ranks(playground: Playground, tmp_path: Path):
    playground.open("#pipeline-size=6&num-microbatches=12&time-f=10,10,15,10,10,10&a.schedule=1f1b")
    (tmp_path / "own.json").write_text(schedule_to_json(generate("zb-h1", 4, 8)))
    before = playground.num_drawn
    playground.page.set_input_files("#open", tmp_path / "own.json")
    playground.wait_for_drawing(before)
    assert playground.field("time-f").input_value() == "10,10,15,10"
    expected = printed("simulate", f"--input={tmp_path / 'own.json'}", "--time-f=10,10,15,10")
    assert playground.figures("a")["Bubble"] == percent(expected["bubble_rate"])


def test_costs_that_changed_are_plotted_anew(playground: Playground, tmp_path: Path):
    page, file = playground.page, tmp_path / "costs.json"
    playground.open("#pipeline-size=4&num-microbatches=8&a.schedule=auto&a.memory-limit=4")
    for message in (0.3, 9):
        file.write_text(costs_to_json(StageCosts.uniform(4, 10, 9, 7, message)))
        before = playground.num_drawn
        page.set_input_files("#open", file)
        playground.wait_for_drawing(before)
        forget_files()
        lost = printed("simulate", "--schedule=auto", "--memory-limit=10", *SIZE, f"--costs={file}")["lost"]
        page.locator(f"#plot title:text-is('auto: {percent(lost)} under 10 M_B')").wait_for(state="attached")


def test_costs_take_the_place_of_a_run(playground: Playground, tmp_path: Path):
    (tmp_path / "run.trace.json").write_text(to_chrome_trace(simulate(generate("zb-h1", 4, 8), COSTS)))
    (tmp_path / "costs.json").write_text(costs_to_json(COSTS))
    before = playground.num_drawn
    playground.page.set_input_files("#open", [tmp_path / "run.trace.json", tmp_path / "costs.json"])
    playground.page.wait_for_selector(".file:visible")
    playground.wait_for_drawing(before, 2)
    expected = printed("simulate", "--schedule=1f1b", *SIZE, f"--costs={tmp_path / 'costs.json'}")
    playground.page.wait_for_selector(f"[data-pane=a] dd:text-is('{percent(expected['bubble_rate'])}')")


def test_a_file_that_cannot_be_read_is_refused_in_words(playground: Playground):
    data = playground.page.evaluate_handle(
        "() => { const data = new DataTransfer(), file = new File([], 'folder');"
        " data.items.add(file); file.text = () => Promise.reject(new Error('is a folder'));"
        " return Object.defineProperty(data, 'files', { value: [file] }) && data; }"
    )
    playground.page.dispatch_event("body", "drop", {"dataTransfer": data})
    playground.page.wait_for_selector("#notice:visible")
    assert playground.page.locator("#notice").inner_text() == "folder: is a folder"
