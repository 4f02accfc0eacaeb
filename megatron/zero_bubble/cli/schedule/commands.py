"""The subcommands of zero-bubble schedule: every one takes the flags and prints or writes its result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.cli.schedule.figures import Report, make_schedule, read_schedule, report_on, report_on_all
from megatron.zero_bubble.cli.schedule.memory_curve import memory_curve
from megatron.zero_bubble.cli.schedule.rank_costs import stage_costs, times_are_given
from megatron.zero_bubble.cli.tables import table
from megatron.zero_bubble.schedule import Schedule, ScheduleError, lower, validate, with_post_validation
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw import to_chrome_trace, to_html, to_svg
from megatron.zero_bubble.schedule.formats import (
    schedule_to_csv,
    schedule_to_grid,
    schedule_to_json,
    schedule_to_pytorch_csv,
)
from megatron.zero_bubble.schedule.generators import ENTRIES
from megatron.zero_bubble.schedule.memory import peaks
from megatron.zero_bubble.schedule.step_ops import operation_name


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def list_schedules(arguments: argparse.Namespace) -> None:
    entries = ENTRIES.values()
    if arguments.json:
        rows = [
            {"schedule": e.name, "placement": e.placement, "num_chunks": e.num_chunks, "summary": e.summary}
            for e in entries
        ]
        deliver(_json(rows), arguments.output)
        return
    width = max(len(entry.name) for entry in entries)
    deliver("".join(f"{entry.name:<{width}}  {entry.summary}\n" for entry in entries), arguments.output)


def generate(arguments: argparse.Namespace) -> None:
    schedule = _source(arguments)
    if arguments.post_validation:
        schedule = with_post_validation(schedule, stage_costs(arguments, schedule.placement))
    if arguments.lower:
        schedule = lower(schedule, arguments.receive_ahead, stage_costs(arguments, schedule.placement))
    validate(schedule)
    suffixes = {".json": "json", ".csv": "csv"}
    suffix = arguments.output.suffix if arguments.output else ""
    writers: dict[str, Callable[[Schedule], str]] = {
        "grid": schedule_to_grid,
        "json": schedule_to_json,
        "csv": schedule_to_csv,
        "pytorch": schedule_to_pytorch_csv,
    }
    deliver(writers[arguments.format or suffixes.get(suffix, "grid")](schedule), arguments.output)


def _source(arguments: argparse.Namespace) -> Schedule:
    if arguments.input is not None:
        return read_schedule(arguments.input)
    return make_schedule(arguments, arguments.schedule, arguments.memory_limit)[0]


def simulate(arguments: argparse.Namespace) -> None:
    found = report_on(arguments)
    if arguments.json:
        deliver(_json(found.as_json()), arguments.output)
        return
    deliver(_summary([found]) + "\n" + _ranks(found), arguments.output)


def compare(arguments: argparse.Namespace) -> None:
    found = report_on_all(arguments, post_validation=arguments.post_validation)
    if arguments.json:
        deliver(_json([one.as_json() for one in found]), arguments.output)
    else:
        deliver(_summary(found, markdown=arguments.markdown), arguments.output)


def _summary(found: list[Report], *, markdown: bool = False) -> str:
    heads: tuple[str, ...] = (
        "schedule",
        "bubble",
        "cost",
        "above bound",
        "makespan",
        "memory (M_B)",
        "messages",
        "made in",
    )
    rows: list[tuple[str, ...]] = [
        (
            one.schedule.name,
            f"{100 * float(one.timeline.bubble_rate):.2f}%",
            f"{float(one.timeline.cost):.6g}",
            f"{100 * one.above_bound:.2f}%",
            f"{float(one.timeline.makespan):.6g}",
            f"{max(one.peak_memory):.4g}",
            str(one.num_messages),
            f"{one.generation_seconds:.3f} s",
        )
        for one in found
    ]
    if any(one.schedule.has_post_validation for one in found):
        heads += ("iteration", "without", "gain")
        rows = [(*row, *_iteration_times(one)) for row, one in zip(rows, found, strict=True)]
    return table(heads, rows, markdown=markdown)


def _iteration_times(one: Report) -> tuple[str, str, str]:
    """With post-validation and without it, and by how much iterations are faster for it."""
    return f"{float(one.iteration_time):.6g}", f"{float(one.without_post_validation):.6g}", f"{100 * one.gain:.2f}%"


def _ranks(found: Report) -> str:
    """Span, bubble by cause and peak memory of every rank."""
    idle = causes(found.timeline)
    rows = []
    for rank, peak in enumerate(peaks(found.timeline.schedule, found.timeline.costs)):
        values = (found.timeline.spans[rank], *(cause[rank] for cause in idle.values()), peak.amount)
        op = operation_name(peak.op, found.schedule.num_microbatches, found.steps) if peak.op else ""
        rows.append((str(rank), *(f"{float(value):.6g}" for value in values), op))
    return table(("rank", "span", *idle, "memory (M_B)", "at"), rows)


def draw(arguments: argparse.Namespace) -> None:
    output = arguments.output
    if output.suffix not in (".svg", ".html", ".json"):
        raise ScheduleError(f"--output {output} must end in .svg, .html, or .json (for Perfetto)")
    timeline, steps = report_on(arguments).timeline, arguments.steps
    if output.suffix == ".json":
        deliver(to_chrome_trace(timeline, steps=steps), output)
        return
    unit = arguments.time_unit or ("ms" if times_are_given(arguments) else "F")
    to_picture = to_svg if output.suffix == ".svg" else to_html
    picture = to_picture(timeline, title=arguments.title, time_unit=unit, steps=steps, width=arguments.width)
    deliver(picture, output)


def check(arguments: argparse.Namespace) -> None:
    schedule = _source(arguments)
    validate(schedule)
    lowered = schedule if schedule.is_lowered else lower(schedule)
    validate(lowered)
    num_ops = sum(len(list(schedule.compute_ops(rank))) for rank in range(schedule.num_ranks))
    num_messages = (sum(map(len, lowered.ops)) - num_ops) // 2
    if arguments.json:
        figures = {"schedule": schedule.name, "valid": True, "operations": num_ops, "messages": num_messages}
        deliver(_json(figures), arguments.output)
    else:
        words = f"{schedule.name} is valid: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
        deliver(f"{words}, {num_ops} operations, {num_messages} messages\n", arguments.output)


COMMANDS: MappingProxyType[str, Callable[[argparse.Namespace], None]] = MappingProxyType(
    {
        "list": list_schedules,
        "generate": generate,
        "simulate": simulate,
        "compare": compare,
        "draw": draw,
        "validate": check,
        "memory-curve": memory_curve,
    }
)
