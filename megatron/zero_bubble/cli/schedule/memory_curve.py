"""Computes the bubble rate of schedules over a range of memory limits; time for R counts as bubble there."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.cli.output import deliver, percent, table
from megatron.zero_bubble.cli.schedule.arguments import CurveFlags
from megatron.zero_bubble.cli.schedule.figures import ScheduleFigures, make_schedule, simulated_figures
from megatron.zero_bubble.cli.shared_flags import to_json
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of
from megatron.zero_bubble.schedule import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.draw import Series, to_plot
from megatron.zero_bubble.schedule.recomputation import Recompute


def memory_curve(flags: CurveFlags) -> None:
    """Print or write the bubble rate of every schedule under every limit, and plot it if --output is an SVG."""
    each = curve_limits(flags)
    chosen = flags.schedule or ["auto"]
    for name in chosen:
        if not entry_of(name).takes_limit:
            planned = ", ".join(entry.name for entry in ENTRIES.values() if entry.takes_limit)
            raise ScheduleError(f"--schedule {name} has a memory of its own, whatever the limit: choose from {planned}")
    curves = {name: [_at(flags, name, limit * flags.pipeline_size) for limit in each] for name in chosen}
    words = _curves_as_json(flags, each, curves) if flags.json else _curves_as_table(each, curves)
    if flags.output is not None and flags.output.suffix == ".svg":
        deliver(_curves_as_plot(flags, each, curves), flags.output)
        deliver(words, None)
    else:
        deliver(words, flags.output)


def curve_limits(flags: CurveFlags) -> list[float]:
    """Return the limits from --from to --to, in p M_B. Raises `ScheduleError`."""
    first, last, step = flags.first, flags.to, flags.step
    if last < first:
        raise ScheduleError(f"--to {last:g} is below --from {first:g}")
    steps = (last - first) / step * (1 + 1e-9)
    if steps >= 1000:
        raise ScheduleError(f"{steps + 1:.0f} limits are too many: choose a larger --step")
    return [first + i * step for i in range(int(steps) + 1)]


def _at(flags: CurveFlags, name: str, limit: float) -> ScheduleFigures | None:
    """Return the figures of the schedule `name` under `limit` (in M_B); None if it does not fit."""
    try:
        return simulated_figures(flags, *make_schedule(flags, name, [limit]))
    except Infeasible:
        return None


def _curves_as_table(limits: Sequence[float], curves: dict[str, list[ScheduleFigures | None]]) -> str:
    rows = []
    for i, limit in enumerate(limits):
        points = [curve[i] for curve in curves.values()]
        rows.append((f"{limit:g}", *(percent(r.lost) if r else "-" for r in points)))
    return table(("limit (p M_B)", *curves), rows)


def _curves_as_json(flags: CurveFlags, limits: Sequence[float], curves: dict[str, list[ScheduleFigures | None]]) -> str:
    points = [
        {
            "schedule": name,
            "memory_limit": limit * flags.pipeline_size,
            "bubble_rate": None if figures is None else float(figures.timeline.bubble_rate),
            "idle": None if figures is None else float(figures.timeline.idle.total),
            "recomputed": None if figures is None else figures.recomputed,
            "lost": None if figures is None else figures.lost,
            "peak_memory": None if figures is None else max(figures.peak_memory),
            "lower_bound": None if figures is None else figures.lower_bound,
        }
        for name, curve in curves.items()
        for limit, figures in zip(limits, curve, strict=True)
    ]
    return to_json(points)


def _curves_as_plot(flags: CurveFlags, limits: Sequence[float], curves: dict[str, list[ScheduleFigures | None]]) -> str:
    series = []
    for name, curve in curves.items():
        points = [(x, 100 * r.lost) for x, r in zip(limits, curve, strict=True) if r]
        if points:
            series.append(Series(name, tuple(points)))
    if not series:
        raise ScheduleError(f"nothing fits under any of these limits: {', '.join(curves)}")
    y_label = "bubble rate (%)" if flags.recomputation is Recompute.NONE else "bubble and recomputation (%)"
    title = f"{flags.pipeline_size} ranks, {flags.num_microbatches} microbatches"
    return to_plot(series, title=title, x_label="memory limit (p M_B)", y_label=y_label)
