from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts, bubbles, critical_path, repeat, simulate, with_post_validation
from megatron.zero_bubble.schedule.analysis import idle_ranks_over_time, memory_over_time
from megatron.zero_bubble.schedule.draw import (
    canvas,
    palette,
    to_chrome_trace,
    to_html,
    to_svg,
)
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind
from tests.schedule.drawings import SVG, timeline_of

LEFT, RIGHT = 76, 60


def ops_in(svg):
    """{(op, rank): rectangle} of all operations and marks."""
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if rect.get("class") in ("o", "s"):
            tip = rect.find(f"{SVG}title").text
            op, rank = re.match(r"(.+) on rank (\d+), ", tip).groups()
            assert (op, int(rank)) not in found
            found[op, int(rank)] = (rect.attrib, tip)
    return found


def words_in(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def labels_in(svg):
    return [node for node in ElementTree.fromstring(svg).iter(f"{SVG}text") if node.get("class") == "l"]


def paths_in(svg, kind):
    """The corners of the paths of a class."""
    paths = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}path") if node.get("class") == kind]
    return [re.findall(r"[ML]([\d.]+) ([\d.]+)", node.get("d")) for node in paths]


def test_svg_draws_every_op_where_it_runs():
    timeline = timeline_of()
    ops = ops_in(to_svg(timeline, width=1000))
    assert len(ops) == sum(map(len, timeline.lanes)) == 36
    scale = (1000 - LEFT - RIGHT) / float(timeline.makespan)
    for rank, lane in enumerate(timeline.lanes):
        for op, start, end in lane:
            attributes, title = ops[str(op), rank]
            assert float(attributes["x"]) == pytest.approx(LEFT + start * scale, abs=0.01)
            assert float(attributes["width"]) == pytest.approx((end - start) * scale, abs=0.9)
            assert attributes["fill"] == KINDS[op.kind].colour
            assert f": {start} to {end} ms (takes {end - start}), rank holds " in title
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
    """A measured timeline begins late."""
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
    words = words_in(to_svg(timeline_of(), title="a < b\x1b"))
    assert words[0] == "a < b "
    assert words[1].startswith("3 ranks, 4 microbatches: idle ")
    assert {"F forward", "B input gradient", "W weight gradient"} <= set(words)
    assert "BW both gradients" not in words


def test_chunks_have_their_own_shade():
    ops = ops_in(to_svg(timeline_of("interleaved-zb", 2, 4, num_chunks=3)))
    fills = [ops[op, 0][0]["fill"] for op in ("F0", "F0.1", "F0.2")]
    assert len(set(fills)) == 3
    assert not palette.is_dark(fills[0])
    assert palette.is_dark(fills[2])


def test_a_wide_pipeline_is_as_wide_as_a_screen_and_labelled_where_there_is_room():
    timeline = timeline_of("1f1b", 16, 64)
    num_ops = sum(map(len, timeline.lanes))
    for svg, has_labels in ((to_svg(timeline), False), (to_svg(timeline, width=6000), True)):
        labels = labels_in(svg)
        assert len(labels) == (num_ops if has_labels else 0), "all of them or none, and with their letters"
        assert {label.text for label in labels} == {f"{k}{m}" for k in ("F", "BW") for m in range(64) if has_labels}
    assert float(ElementTree.fromstring(to_svg(timeline)).get("width")) == 1400
    assert "BW63" in [
        label.text for label in labels_in(to_html(timeline).split('<div id="drawing">')[1].split("</div>")[0])
    ]


@pytest.mark.parametrize(("name", "width"), [("zb-h1", 1000), ("zb-v", 1400), ("1f1b", 700), ("zb-2p", 1400)])
def test_labels_stay_within_their_operations(name, width):
    """The widths of Helvetica's letters: W 0.95, F 0.61, B 0.67, digits 0.56."""
    svg = to_svg(timeline_of(name, 4, 12), width=width)
    cells = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}rect") if node.get("class") == "o"]
    places = sorted((float(c.get("y")), float(c.get("x")), float(c.get("width"))) for c in cells)
    labels = labels_in(svg)
    assert len(labels) > 0.6 * len(cells)
    for letter in {label.text[0] for label in labels}:
        assert len({label.get("font-size") for label in labels if label.text[0] == letter}) == 1
    for label in labels:
        size, x, y = (float(label.get(key)) for key in ("font-size", "x", "y"))
        assert size >= 6
        letters = sum({"W": 0.95, "F": 0.61, "B": 0.67}.get(letter, 0.56) for letter in label.text)
        drawn = float(label.get("textLength") or letters * size)
        assert drawn > 0.6 * letters * size, "narrower could not be read"
        [(_, left, cell)] = [one for one in places if one[0] < y < one[0] + 26 and one[1] < x < one[1] + one[2]]
        assert left <= x - drawn / 2
        assert x + drawn / 2 <= left + cell + 1


def test_the_curves_count_idle_ranks_and_memory_over_time():
    timeline = simulate(generate("1f1b", 2, 2), StageCosts.uniform(2))
    assert idle_ranks_over_time(timeline) == [(0, 1), (1, 0), (2, 1), (4, 0), (6, 1), (9, 2)]
    assert memory_over_time(timeline, 1) == [(0, 0), (1, 1), (2, 1), (4, 1), (5, 1), (7, 0)]


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
    svg = to_svg(timeline, width=1000, steps=2)
    ops = ops_in(svg)
    assert len(ops) == 4 * (2 * (3 * 8 + 2) - 1), "the first iteration has nothing to validate"
    scale = (1000 - LEFT - RIGHT) / float(timeline.makespan)
    for rank in range(4):
        mark, tip = ops["STEP of iteration 1", rank]
        time = float(timeline.lanes[rank][3 * 8].start)
        assert float(mark["x"]) + float(mark["width"]) / 2 == pytest.approx(LEFT + time * scale, abs=0.01)
        assert float(mark["width"]) >= 2, "it takes no time, and has to be seen"
        assert mark["fill"] == KINDS[OpKind.STEP].colour
        assert tip == f"STEP of iteration 1 on rank {rank}, at {time:g} ms"
        assert ops["VALIDATE of iteration 2", rank][0]["fill"] == KINDS[OpKind.VALIDATE].colour
    words = set(words_in(svg))
    assert {KINDS[OpKind.STEP].meaning, KINDS[OpKind.VALIDATE].meaning} <= words
    assert "VALIDATE" not in to_svg(timeline_of())
    assert "waiting for validation" in to_html(timeline)
    assert "validation" not in to_html(timeline_of())


def test_every_iteration_numbers_its_microbatches_from_zero():
    costs = StageCosts.uniform(4)
    once = with_post_validation(generate("zb-2p", 4, 8, costs=costs), costs)
    timeline = simulate(repeat(once, 3), costs)
    svg = to_svg(timeline, width=3000, steps=3)
    assert words_in(svg)[1].startswith("4 ranks, 8 microbatches, 3 iterations: idle ")
    labels = [label.text for label in labels_in(svg)]
    assert sorted(set(labels)) == sorted(f"{kind}{m}" for kind in "FBW" for m in range(8))
    assert labels.count("W7") == 4 * 3
    assert {("F7 of iteration 1", 0), ("F0 of iteration 3", 3)} <= set(ops_in(svg))
    assert "F7 of iteration 1" in to_html(timeline, steps=3)
    names = {event["name"] for event in json.loads(to_chrome_trace(timeline, steps=3))["traceEvents"]}
    assert "W7 of iteration 3" in names
    assert not [name for name in names if re.match("[FBW]8", name)]


def test_hovering_shows_the_messages_of_a_microbatch():
    timeline = timeline_of("zb-h1", 3, 4)
    svg = to_svg(timeline, width=1000)
    root = ElementTree.fromstring(svg)
    groups = {node.get("class"): node for node in root.iter(f"{SVG}g")}
    assert set(groups) == {f"m m{k}" for k in range(4)}
    assert [rect.find(f"{SVG}title").text.split()[0] for rect in groups["m m2"].iter(f"{SVG}rect")] == [
        *("F2", "B2", "W2") * 3
    ]
    ops = ops_in(svg)
    for k in range(4):
        assert f".m{k}:hover~.a{k}" in svg
        light, dark = paths_in(svg, f"a a{k}")
        assert light == dark, "seen on any colour"
        lines = [dark[i : i + 2] for i in range(0, len(dark), 5)]
        ways = [(f"F{k}", 0, 1), (f"F{k}", 1, 2), (f"B{k}", 2, 1), (f"B{k}", 1, 0)]
        expected = []
        for op, source, destination in ways:
            begin, end = ops[op, source][0], ops[op, destination][0]
            expected.append((float(begin["x"]) + float(begin["width"]), float(begin["y"]) + 13))
            expected.append((float(end["x"]), float(end["y"]) + 13))
        found = sorted((float(x), float(y)) for points in lines for x, y in points)
        for (x, y), (wanted_x, wanted_y) in zip(found, sorted(expected), strict=True):
            assert (x, y) == (pytest.approx(wanted_x, abs=1), wanted_y)
    assert "visibility:hidden" in svg
    assert "<script" not in svg


def test_the_critical_path_is_a_line_through_what_nothing_could_begin_before():
    timeline = timeline_of("zb-h1", 3, 4)
    svg = to_svg(timeline, width=1000)
    _, line = paths_in(svg, "p")
    ops = ops_in(svg)
    begins = [(float(x), float(y)) for x, y in line[::2]]
    path = critical_path(timeline)
    assert len(begins) == len(path) > 8
    for (x, y), (rank, timed) in zip(begins, path, strict=True):
        cell = ops[str(timed.op), rank][0]
        assert x == pytest.approx(float(cell["x"]), abs=0.01)
        assert float(cell["y"]) < y < float(cell["y"]) + float(cell["height"])
    assert "critical path" in words_in(svg)


def test_every_row_ends_with_its_bubble():
    costs = StageCosts((2, 4), (2, 4), (2, 4), (0,), (1, 1), (-1, -1), (0, 0))
    timeline = simulate(generate("1f1b", 2, 2), costs)
    shares = [f"{100 * bubble.total / timeline.makespan:.1f}%" for bubble in bubbles(timeline)]
    assert shares == ["60.0%", "20.0%"]
    assert [word for word in words_in(to_svg(timeline)) if re.fullmatch(r"[\d.]+%", word)] == shares
    assert "rank 1 idles 6 of 30 ms: warmup 2, tail 4" in to_svg(timeline)


def test_axes_have_units_and_memory_is_shown_where_it_is_known():
    timeline = timeline_of()
    words = words_in(to_svg(timeline, time_unit="s", memory_unit="GB"))
    assert {"time (s)", "idle ranks (of 3)", "memory held by each rank (GB)"} <= set(words)
    assert ", peak memory 3 GB" in words[1]
    unknown = StageCosts.uniform(3, memory_f=0, memory_b=0, memory_w=0)
    svg, page = (draw(simulate(timeline.schedule, unknown), memory_unit="MiB") for draw in (to_svg, to_html))
    assert "MiB" not in svg
    assert "MiB" not in page
    assert "memory" not in svg


def test_pictures_have_colours_for_dark_surroundings():
    svg = to_svg(timeline_of())
    assert "prefers-color-scheme:dark" in svg
    used = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', svg))
    dark = dict(re.findall(r'\[fill="(#\w+)"\]\{fill:(#\w+)\}', svg))
    assert (
        {canvas.INK, canvas.PAPER, canvas.LANE, canvas.FAINT, canvas.STRONG}
        <= used
        <= set(dark)
        | {
            *(facts.colour for facts in KINDS.values() if facts.colour),
            *canvas.LABEL_INKS,
            *(palette.colour_of_rank(rank, 3) for rank in range(3)),
        }
    )
    for light, other in dark.items():
        if light not in (canvas.LANE, canvas.FAINT):
            assert palette.is_dark(light) != palette.is_dark(other)


@pytest.mark.parametrize("duration", [1e-9, 1e12])
def test_numbers_of_any_size_can_be_read(duration):
    timeline = simulate(generate("1f1b", 2, 2), StageCosts.uniform(2, duration, duration, duration))
    words = words_in(to_svg(timeline))
    assert f"longest span {9 * duration:g} ms" in words[1]
    assert max(map(len, words)) < 130
    assert len(set(words)) > 12


def test_marks_do_not_decide_how_wide_a_drawing_is():
    timeline = timeline_of("1f1b")
    validated = simulate(with_post_validation(timeline.schedule, timeline.costs), timeline.costs)
    widths = [ElementTree.fromstring(to_svg(one)).attrib["width"] for one in (timeline, validated)]
    assert widths[0] == widths[1]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_operations_on_vocabulary_shards_are_drawn(name):
    """The loss, which takes no time, is a mark. Narrow embeddings make no drawing wide, but the legend has its room."""
    schedule = generate(name, 2, 2, vocabulary_parallel=True)
    shard = {"time_e": 0.01, "time_ew": 0.01, "time_s": 0.5, "time_t": 0.25}
    timeline = simulate(schedule, StageCosts.uniform(schedule.num_stages).with_shards(schedule.placement, shard))
    svg = to_svg(timeline)
    ops = ops_in(svg)
    assert len(ops) == sum(map(len, timeline.lanes))
    rank_of_loss = schedule.placement.rank_of(schedule.num_stages - 1)
    marks = {op for op, (attributes, _) in ops.items() if attributes["class"] == "s"}
    assert marks == {("L0", rank_of_loss), ("L1", rank_of_loss)}
    width = float(ElementTree.fromstring(svg).get("width"))
    entries = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}text") if node.get("y") == "63"]
    assert [node.text for node in entries][-1] == "critical path"
    assert "S output layer's softmax" in words_in(svg)
    assert max(float(node.get("x")) + 6 * len(node.text) for node in entries) <= width + 1 < 1500
    json.loads(to_chrome_trace(timeline))
    assert "EW1" in to_html(timeline)
