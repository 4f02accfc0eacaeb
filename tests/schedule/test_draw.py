from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
from test_lower import made_of

from megatron.zero_bubble.schedule import StageCosts, generate, repeat, simulate, with_post_validation
from megatron.zero_bubble.schedule.draw import (
    Series,
    canvas,
    curves,
    palette,
    to_chrome_trace,
    to_html,
    to_plot,
    to_svg,
)
from megatron.zero_bubble.schedule.ir import COMMUNICATION, OpKind

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name="zb-h1", ranks=3, microbatches=4, **options):
    schedule = generate(name, ranks, microbatches, **options)
    return simulate(schedule, StageCosts.uniform(schedule.num_stages, 4, 3, 2, 1))


def ops_in(svg):
    """{(op, rank): rectangle} of all operations."""
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            op, rank = re.match(r"(\S+) on rank (\d+), ", title.text).groups()
            found[op, int(rank)] = (rect.attrib, title.text)
    return found


def test_svg_draws_every_op_where_it_runs():
    timeline = timeline_of()
    ops = ops_in(to_svg(timeline, width=1000))
    assert len(ops) == sum(map(len, timeline.lanes)) == 36
    scale = (1000 - 76 - 24) / float(timeline.makespan)
    for rank, lane in enumerate(timeline.lanes):
        for op, start, end in lane:
            attributes, title = ops[str(op), rank]
            assert float(attributes["x"]) == pytest.approx(76 + start * scale, abs=0.01)
            assert float(attributes["width"]) == pytest.approx((end - start) * scale, abs=0.9)
            assert attributes["fill"] == palette.FILLS[op.kind]
            assert f": {start} to {end} (takes {end - start}), rank holds " in title
    tops = [float(ops["F0", rank][0]["y"]) for rank in range(3)]
    assert tops == sorted(tops)
    assert len(set(tops)) == 3


def test_drawings_of_one_width_and_duration_have_one_scale():
    short, long = timeline_of("zb-h2"), timeline_of("1f1b")
    assert short.makespan < long.makespan
    svgs = [to_svg(timeline, width=1000, duration=float(long.makespan)) for timeline in (short, long)]
    assert svgs[1] == to_svg(long, width=1000)
    first, other = (ops_in(svg)["F0", 0][0]["width"] for svg in svgs)
    assert first == other


def test_a_timeline_may_begin_late():
    """As one that was measured does."""
    early = timeline_of()
    lanes = tuple(
        tuple(timed._replace(start=timed.start + 100, end=timed.end + 100) for timed in lane) for lane in early.lanes
    )
    ops, shifted = ops_in(to_svg(early)), ops_in(to_svg(replace(early, lanes=lanes)))
    assert {op: rect[0] for op, rect in ops.items()} == {op: rect[0] for op, rect in shifted.items()}


def test_hovering_tells_the_memory():
    ops = ops_in(to_svg(timeline_of(), memory_unit="GB"))
    assert ops["F2", 0][1].endswith("rank holds 3 GB")
    assert ops["W0", 0][1].endswith("rank holds 2.5 GB")


def test_the_header_names_what_is_shown():
    words = [node.text for node in ElementTree.fromstring(to_svg(timeline_of(), title="a < b")).iter(f"{SVG}text")]
    assert words[0] == "a < b"
    assert words[1].startswith("3 ranks, 4 microbatches: bubble rate ")
    assert {"F forward", "B input gradient", "W weight gradient"} <= set(words)
    assert "BW both gradients" not in words


def test_chunks_have_their_own_shade():
    ops = ops_in(to_svg(timeline_of("interleaved-zb", 2, 4, num_chunks=3)))
    fills = [ops[op, 0][0]["fill"] for op in ("F0", "F0.1", "F0.2")]
    assert len(set(fills)) == 3
    assert not palette.is_dark(fills[0])
    assert palette.is_dark(fills[2])


def test_a_wide_pipeline_still_has_labels():
    timeline = timeline_of("1f1b", 32, 64)
    nodes = ElementTree.fromstring(to_svg(timeline)).iter(f"{SVG}text")
    labels = [node.text for node in nodes if node.attrib["text-anchor"] == "middle"]
    assert len(labels) > sum(map(len, timeline.lanes)), "one an operation, and the times"
    assert labels.count("F63") + labels.count("63") >= 64


def test_curves():
    timeline = simulate(generate("1f1b", 2, 2), StageCosts.uniform(2))
    assert curves.idle_ranks(timeline) == [(0, 1), (1, 0), (2, 1), (4, 0), (6, 1), (9, 2)]
    assert curves.memory(timeline, 1) == [(0, 0), (1, 1), (2, 1), (4, 1), (5, 1), (7, 0)]


def test_html_is_self_contained():
    page = to_html(timeline_of(), title="<title>")
    assert page.count("<title>&lt;title&gt;</title>") == 1
    assert set(re.findall(r"https?://[^\"' )]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href)=", page)
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    assert len(rows) == 1 + 3
    assert re.findall(r"<t[hd]>(.*?)</t[hd]>", rows[1])[-1] == "F2"


def test_steps_and_validations_are_marks_where_a_schedule_has_them():
    costs = StageCosts.uniform(4, 4, 4, 4)
    once = with_post_validation(generate("zb-2p", 4, 8, costs=costs), costs)
    timeline = simulate(repeat(once, 2), costs)
    svg = to_svg(timeline, width=1000)
    ops = ops_in(svg)
    assert len(ops) == 4 * 2 * (3 * 8 + 2)
    scale = (1000 - 76 - 24) / float(timeline.makespan)
    for rank in range(4):
        mark, tip = ops["STEP0", rank]
        time = float(timeline.lanes[rank][3 * 8 + 1].start)
        assert float(mark["x"]) + float(mark["width"]) / 2 == pytest.approx(76 + time * scale, abs=0.01)
        assert float(mark["width"]) >= 2, "it takes no time, and has to be seen"
        assert mark["fill"] == palette.FILLS[OpKind.STEP]
        assert tip == f"STEP0 on rank {rank}, at {time:g}"
        assert ops["VALIDATE1", rank][0]["fill"] == palette.FILLS[OpKind.VALIDATE]
    words = {node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert {palette.MEANINGS[OpKind.STEP], palette.MEANINGS[OpKind.VALIDATE]} <= words
    assert "VALIDATE" not in to_svg(timeline_of())
    assert "waiting for validation" in to_html(timeline)
    assert "validation" not in to_html(timeline_of())


def test_marks_do_not_decide_how_wide_a_drawing_is():
    timeline = timeline_of("1f1b")
    validated = simulate(with_post_validation(timeline.schedule, timeline.costs), timeline.costs)
    widths = [ElementTree.fromstring(to_svg(one)).attrib["width"] for one in (timeline, validated)]
    assert widths[0] == widths[1]


def test_what_takes_no_time_is_an_instant_of_the_trace():
    costs = StageCosts.uniform(2)
    timeline = simulate(repeat(with_post_validation(generate("1f1b", 2, 2), costs), 2), costs)
    events = json.loads(to_chrome_trace(timeline, microseconds=10))["traceEvents"]
    [step] = [event for event in events if event["name"] == "STEP1" and event["tid"] == 1]
    assert (step["ph"], step["s"], step["args"]) == ("i", "t", {"iteration": 1})
    assert step["ts"] == 10 * timeline.lanes[1][-1].start


def test_chrome_trace():
    timeline = timeline_of()
    events = json.loads(to_chrome_trace(timeline, microseconds=10))["traceEvents"]
    ops = {(event["tid"], event["name"]): event for event in events if event["ph"] == "X"}
    for rank, lane in enumerate(timeline.lanes):
        for op, start, end in lane:
            event = ops.pop((rank, str(op)))
            assert (event["ts"], event["dur"]) == (start * 10, (end - start) * 10)
            assert event["args"] == {"stage": rank, "chunk": 0, "microbatch": op.microbatch}
    assert not ops
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [
        f"rank {rank}" for rank in range(3)
    ]
    assert max(event["args"]["value"] for event in events if event["name"] == "memory of rank 0") == 3


def test_empty_ranks_can_be_drawn():
    empty = simulate(made_of("linear", 2, 1, 1, "", ""), StageCosts.uniform(2))
    ElementTree.fromstring(to_svg(empty))
    to_html(empty)
    json.loads(to_chrome_trace(empty))


def test_plot():
    series = [Series("auto", ((1, 0.2), (2, 0.1))), Series("zb & h1", ((2, 0.15),))]
    root = ElementTree.fromstring(to_plot(series, title="t", x_label="x", y_label="y"))
    titles = [node.text for node in root.iter(f"{SVG}title")]
    assert titles == ["auto", "auto: 0.2 at 1", "auto: 0.1 at 2", "zb & h1: 0.15 at 2"]
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    assert circles[0][0] < circles[1][0] == circles[2][0]
    assert circles[0][1] < circles[2][1] < circles[1][1]


@pytest.mark.parametrize("largest", [0.03, 1, 7, 33, 40000.5])
def test_ticks_are_round_and_end_below_the_largest(largest):
    ticks = canvas.ticks(largest, 6)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 8
    assert largest / 2 < ticks[-1] <= largest * 1.000001


# How colours look without the red and without the green receptor (Machado, Oliveira, Fernandes 2009, severity 1).
BLINDNESS = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


@pytest.mark.parametrize("matrix", BLINDNESS.values(), ids=BLINDNESS)
def test_kinds_stay_apart_for_colour_blind_eyes(matrix):
    def seen(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return [sum(weight * c for weight, c in zip(row, linear, strict=True)) for row in matrix]

    for first, second in combinations(palette.FILLS.values(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen(first), seen(second), strict=True)) ** 0.5
        assert distance > 0.15, (first, second)
    assert set(palette.MEANINGS) == set(OpKind) - COMMUNICATION == {*palette.FILLS, OpKind.W_TAIL}
