"""The playground follows its fields, names mistakes beside them, and fits the screen, in a real browser."""

from __future__ import annotations

import pytest

from tests.browser.opened_page import SIZE, TIMES, Playground, percent, printed


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


def test_a_list_that_was_cut_while_a_size_was_typed_is_whole_again(playground: Playground):
    playground.set("time-f", "10,10,15,12")
    playground.set("pipeline-size", "2")
    assert playground.field("time-f").input_value() == "10,10"
    playground.set("pipeline-size", "5")
    assert playground.field("time-f").input_value() == "10,10,15,12,12"
    playground.set("time-f", "1,2,3,4,5")
    playground.set("pipeline-size", "2")
    playground.set("time-f", "1,2")
    playground.set("pipeline-size", "4")
    assert playground.field("time-f").input_value() == "1,2,2,2"


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


def test_the_skip_link_keeps_the_settings(playground: Playground):
    page = playground.page
    playground.set("time-f", "12")
    page.locator(".skip").press("Enter")
    assert page.locator("#panes:focus").count() == 1
    assert playground.field("time-f").input_value() == "12"
    assert page.locator("#notice").is_hidden()


def test_a_schedule_removed_while_it_is_planned_leaves_no_trace(playground: Playground):
    page = playground.page
    sizes = f"pipeline-size=16&num-microbatches=96&{'&'.join(flag.removeprefix('--') for flag in TIMES)}"
    page.evaluate(
        "fragment => { location.hash = fragment; }", f"{sizes}&a.schedule=1f1b&b.schedule=zb-v&b.memory-limit=15"
    )
    page.wait_for_selector("[data-pane=b].busy")
    page.get_by_role("button", name="Remove schedule B").click()
    before = playground.num_drawn
    playground.field("pipeline-size").fill("4")
    playground.field("num-microbatches").fill("8")
    playground.wait_for_drawing(before)
    expected = printed("simulate", "--schedule=1f1b", *SIZE, *TIMES)
    page.wait_for_selector(f".figures dd:text-is('{expected['makespan']:.4g} ms')")
    assert page.locator("#transport output").inner_text() == f"{expected['makespan']:.4g}"


def test_copying_that_is_not_allowed_is_said(playground: Playground):
    page = playground.page
    page.evaluate("() => Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_selector("#share:text-is('Copying is not allowed')")
    page.wait_for_selector("#share:text-is('Copy link')")
    page.evaluate("() => { delete navigator.clipboard; }")


def test_a_size_below_two_is_one_message(playground: Playground):
    playground.field("pipeline-size").fill("-4")
    playground.page.wait_for_selector("[data-flag=pipeline-size] .message:visible")
    assert playground.message("pipeline-size") == "must be at least 2, got -4"
