"""Bubble rate over memory limits: what more memory would buy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.cli.schedule.figures import Report, make_schedule, report
from megatron.zero_bubble.cli.tables import table
from megatron.zero_bubble.schedule import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.draw import Series, to_plot
from megatron.zero_bubble.schedule.generators import entry_of


def memory_curve(arguments: argparse.Namespace) -> None:
    limits = _limits(arguments)
    chosen = arguments.schedule or ["auto"]
    for name in chosen:
        entry_of(name)
    curves = {name: [_at(arguments, name, limit * arguments.pipeline_size) for limit in limits] for name in chosen}
    words = _json(arguments, limits, curves) if arguments.json else _table(limits, curves)
    if arguments.output is not None and arguments.output.suffix == ".svg":
        deliver(_plot(arguments, limits, curves), arguments.output)
        deliver(words, None)
    else:
        deliver(words, arguments.output)


def _limits(arguments: argparse.Namespace) -> list[float]:
    """From --from to --to, in p M_B."""
    first, last, step = getattr(arguments, "from"), arguments.to, arguments.step
    if last < first:
        raise ScheduleError(f"--to {last:g} is below --from {first:g}")
    steps = (last - first) / step * (1 + 1e-9)
    if steps >= 1000:
        raise ScheduleError(f"{steps + 1:.0f} limits are too many: choose a larger --step")
    return [first + i * step for i in range(int(steps) + 1)]


def _at(arguments: argparse.Namespace, name: str, limit: float) -> Report | None:
    """The report at one limit, in M_B; None where nothing fits."""
    try:
        return report(arguments, *make_schedule(arguments, name, [limit]))
    except Infeasible:
        return None


def _table(limits: Sequence[float], curves: dict[str, list[Report | None]]) -> str:
    rows = []
    for i, limit in enumerate(limits):
        found = [curve[i] for curve in curves.values()]
        rows.append((f"{limit:g}", *(f"{100 * float(r.timeline.bubble_rate):.2f}%" if r else "-" for r in found)))
    return table(("limit (p M_B)", *curves), rows)


def _json(arguments: argparse.Namespace, limits: Sequence[float], curves: dict[str, list[Report | None]]) -> str:
    points = [
        {
            "schedule": name,
            "memory_limit": limit * arguments.pipeline_size,
            "bubble_rate": None if found is None else float(found.timeline.bubble_rate),
            "peak_memory": None if found is None else max(found.peak_memory),
            "lower_bound": None if found is None else found.lower_bound,
        }
        for name, curve in curves.items()
        for limit, found in zip(limits, curve, strict=True)
    ]
    return json.dumps(points, indent=1) + "\n"


def _plot(arguments: argparse.Namespace, limits: Sequence[float], curves: dict[str, list[Report | None]]) -> str:
    series = []
    for name, curve in curves.items():
        points = [(x, 100 * float(r.timeline.bubble_rate)) for x, r in zip(limits, curve, strict=True) if r]
        if points:
            series.append(Series(name, tuple(points)))
    if not series:
        raise ScheduleError(f"nothing fits under any of these limits: {', '.join(curves)}")
    title = f"{arguments.pipeline_size} ranks, {arguments.num_microbatches} microbatches"
    return to_plot(series, title=title, x_label="memory limit (p M_B)", y_label="bubble rate (%)")
