"""Drawings besides the SVG of a timeline: traces, plots, curves, ticks and colours."""

from __future__ import annotations

import json
from itertools import combinations
from xml.etree import ElementTree

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts, repeat, simulate, with_post_validation
from megatron.zero_bubble.schedule.draw import (
    Series,
    canvas,
    to_chrome_trace,
    to_html,
    to_plot,
    to_svg,
)
from megatron.zero_bubble.schedule.graph import arrivals
from megatron.zero_bubble.schedule.kinds import COMMUNICATION, KINDS, OpKind
from tests.schedule.drawings import SVG, timeline_of
from tests.schedule.test_lower import made_of


def test_what_takes_no_time_is_an_instant_of_the_trace():
    costs = StageCosts.uniform(2)
    timeline = simulate(repeat(with_post_validation(generate("1f1b", 2, 2), costs), 2), costs)
    events = json.loads(to_chrome_trace(timeline, microseconds=10, steps=2))["traceEvents"]
    [step] = [event for event in events if event["name"] == "STEP of iteration 2" and event["tid"] == 1]
    assert (step["ph"], step["s"], step["args"]) == ("i", "t", {"iteration": 2})
    assert step["ts"] == 10 * timeline.lanes[1][-1].start


def test_a_chrome_trace_has_every_operation_rank_and_peak():
    timeline = timeline_of()
    events = json.loads(to_chrome_trace(timeline, microseconds=10))["traceEvents"]
    ops = {(event["tid"], event["name"]): event for event in events if event["ph"] == "X"}
    for rank, lane in enumerate(timeline.lanes):
        for op, start, end in lane:
            event = ops.pop((rank, str(op)))
            assert (event["ts"], event["dur"]) == (start * 10, (end - start) * 10)
            assert event["args"] == {"stage": rank, "chunk": 0, "microbatch": op.microbatch, "iteration": 1}
    assert not ops
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [
        f"rank {rank}" for rank in range(3)
    ]
    assert max(event["args"]["value"] for event in events if event["name"] == "memory of rank 0") == 3


@pytest.mark.parametrize(
    "schedule",
    [
        generate("zb-h1", 3, 4),
        generate("zb-v", 2, 4),
        generate("interleaved-1f1b", 2, 4, num_chunks=2),
    ],
)
def test_every_message_is_a_flow_between_two_operations_of_the_trace(schedule):
    """Each flow has both ends, on two ranks; each end is inside of a slice, and no message is missing."""
    timeline = simulate(schedule, StageCosts.uniform(schedule.placement.num_stages, time_comm=0.5))
    events = json.loads(to_chrome_trace(timeline, microseconds=10))["traceEvents"]
    slices = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append(event)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    messages = [arrivals(schedule, rank, op) for rank, ops in enumerate(schedule.ops) for op in ops]
    assert len(starts) == sum(map(len, messages)) > 0
    for number, start in starts.items():
        end = ends[number]
        [sender], [receiver] = (
            [op for op in slices[event["tid"]] if op["ts"] < event["ts"] < op["ts"] + op["dur"]]
            for event in (start, end)
        )
        assert sender["tid"] != receiver["tid"]
        assert sender["args"]["microbatch"] == receiver["args"]["microbatch"]
        assert abs(sender["args"]["stage"] - receiver["args"]["stage"]) == 1
        assert sender["ts"] + sender["dur"] <= receiver["ts"] + 1e-6
        assert end["bp"] == "e"


def test_empty_ranks_can_be_drawn():
    empty = simulate(made_of("linear", 2, 1, 1, "", ""), StageCosts.uniform(2))
    ElementTree.fromstring(to_svg(empty))
    to_html(empty)
    json.loads(to_chrome_trace(empty))


def test_a_plot_has_every_point_of_every_series_in_its_place():
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

    for first, second in combinations(
        [facts.colour for facts in KINDS.values() if facts.colour and not facts.pairs_with], 2
    ):
        distance = sum((a - b) ** 2 for a, b in zip(seen(first), seen(second), strict=True)) ** 0.5
        assert distance > 0.15, (first, second)
    drawn = {kind for kind, facts in KINDS.items() if facts.colour and facts.meaning}
    assert drawn == set(OpKind) - COMMUNICATION
