"""Computes memory curves: bubble rates or, with --dial, iteration times of plans under several memory limits.

The bubble rate of a memory curve includes the time of R.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron.zero_bubble.cli.output import deliver, percent, table
from megatron.zero_bubble.cli.schedule.arguments import CurveFlags
from megatron.zero_bubble.cli.schedule.figures import ScheduleFigures, microbatch_bytes, simulated_figures, stage_costs
from megatron.zero_bubble.cli.schedule.planned_figures import lacking_costs, make_schedule
from megatron.zero_bubble.cli.shared_flags import to_json
from megatron.zero_bubble.planner import placement_for
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of
from megatron.zero_bubble.schedule import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.draw import Series, to_plot
from megatron.zero_bubble.schedule.recomputation import Recompute

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "keep": {},
    "drop": {"recompute": "planned"},
    "offload": {"offload": "auto"},
    "both": {"recompute": "planned", "offload": "auto"},
}
"""Name of a curve of --dial -> flags that let the curve's plans recompute activations or copy them to the host."""
_FIGURES = ("iteration_time", "bubble_rate", "idle", "recomputed", "offloaded", "lost", "lower_bound")
_FULLEST = ("peak_memory", "host_memory")
_LONGEST = 2
"""Largest time in the plot of --dial, relative to `_fastest`; a curve with only larger times is plotted completely."""
_PARTS = (0.8, 0.5, 0.25)
"""The printed text compares the fastest plan with plans that fit into these shares of the fastest plan's memory."""


@dataclass(frozen=True)
class _Curve:
    """A schedule's figures under every memory limit that allows a plan; `variant` is a key of `VARIANTS`."""

    name: str
    schedule: str
    variant: str | None
    points: Mapping[float, ScheduleFigures]


def memory_curve(flags: CurveFlags) -> None:
    """Print or write the memory curve of every schedule, and plot the curves if --output is an SVG."""
    limits = curve_limits(flags)
    variants: dict[str | None, Mapping[str, Any]] = dict(VARIANTS.items()) if flags.dial else {None: {}}
    chosen = flags.schedule or ["auto"]
    for name in chosen:
        if not entry_of(name).takes_limit:
            planned = ", ".join(entry.name for entry in ENTRIES.values() if entry.takes_limit)
            raise ScheduleError(f"--schedule {name} does not depend on a memory limit: choose from {planned}")
    curves = []
    for name in chosen:
        for variant, added in variants.items():
            own = replace(flags, dial=False, **added)
            placement = placement_for(name, flags.pipeline_size, flags.num_chunks, flags.placement)
            if not flags.dial or lacking_costs(own, stage_costs(own, placement)) is None:
                points = _points(own, name, limits, takes_makespan=flags.dial)
                label = name if variant is None else f"{name} {variant}" if len(chosen) > 1 else variant
                curves.append(_Curve(label, name, variant, points))
    words = _curves_as_json(flags, limits, curves) if flags.json else _curves_as_text(flags, limits, curves)
    if flags.output is not None and flags.output.suffix == ".svg":
        deliver(_curves_as_plot(flags, curves), flags.output)
        deliver(words, None)
    else:
        deliver(words, flags.output)


def curve_limits(flags: CurveFlags) -> list[float]:
    """Return the memory limits from --from to --to, in units of 1F1B's peak.

    Raises:
        ScheduleError: --to is below --from, or there would be more than 1000 limits.
    """
    first, last, step = flags.first, flags.to, flags.step
    if last < first:
        raise ScheduleError(f"--to {last:g} is below --from {first:g}")
    steps = (last - first) / step * (1 + 1e-9)
    if steps >= 1000:
        raise ScheduleError(f"{steps + 1:.0f} limits are too many: choose a larger --step")
    return [first + i * step for i in range(int(steps) + 1)]


def _points(
    flags: CurveFlags, name: str, limits: Sequence[float], *, takes_makespan: bool
) -> dict[float, ScheduleFigures]:
    """Return the figures of the best plan under each memory limit; plans for lower limits are candidates as well."""
    points: dict[float, ScheduleFigures] = {}
    candidates: list[ScheduleFigures] = []
    for limit in limits:
        with suppress(Infeasible):
            planned = make_schedule(flags, name, [limit * flags.pipeline_size], takes_makespan=takes_makespan)
            candidates.append(simulated_figures(flags, *planned))
        if candidates:
            best = min(candidates, key=lambda point: point.iteration_time if takes_makespan else point.lost)
            candidates, points[limit] = [best], best
    return points


def _fastest(curves: Sequence[_Curve]) -> ScheduleFigures:
    """Return the fastest plan that keeps all activations or, if no such plan fits, the fastest plan of all curves."""
    keeping = [point for curve in curves if curve.variant == "keep" for point in curve.points.values()]
    points = keeping or [point for curve in curves for point in curve.points.values()]
    if not points:
        raise ScheduleError(f"nothing fits under any of these limits: {', '.join(curve.name for curve in curves)}")
    return min(points, key=lambda point: (point.iteration_time, max(point.peak_memory)))


def _curves_as_text(flags: CurveFlags, limits: Sequence[float], curves: Sequence[_Curve]) -> str:
    fastest = _fastest(curves) if flags.dial else None
    of_microbatch = microbatch_bytes(flags, fastest.schedule.placement) if fastest else None

    def value(point: ScheduleFigures | None) -> str:
        if point is None:
            return "-"
        return f"{point.iteration_time / fastest.iteration_time:.3f}" if fastest else percent(point.lost)

    rows = []
    for limit in limits:
        in_mib = [f"{limit * flags.pipeline_size * of_microbatch / 2**20:.0f}"] if of_microbatch else []
        rows.append((f"{limit:g}", *in_mib, *(value(curve.points.get(limit)) for curve in curves)))
    heads = ("limit (p M_B)", *(["MiB"] if of_microbatch else []), *(curve.name for curve in curves))
    sentences = [] if fastest is None else list(_sentences(flags, limits, curves, fastest))
    return table(heads, rows) + "".join(f"{line}\n" for line in sentences)


def _sentences(
    flags: CurveFlags, limits: Sequence[float], curves: Sequence[_Curve], fastest: ScheduleFigures
) -> Iterator[str]:
    """Yield sentences about the fastest plan, plans that need less memory, and curves left out for lack of costs."""
    memory = max(fastest.peak_memory) / flags.pipeline_size
    drops = fastest.schedule.recomputes or fastest.schedule.offloads
    keeping = "" if drops else " keeping everything"
    yield f"1 is {fastest.iteration_time:.6g}, of {fastest.schedule.name}{keeping}, in {memory:.3g} p M_B"
    nearest = (max((x for x in limits if x <= part * memory), default=0.0) for part in _PARTS)
    for limit in dict.fromkeys(nearest):
        timed = [(curve.name, curve.points[limit].iteration_time) for curve in curves if limit in curve.points]
        if timed:
            times = ", ".join(f"{time / fastest.iteration_time:.3f} ({name})" for name, time in timed)
            yield f"with {100 * (1 - limit / memory):.0f}% less memory, times as long: {times}"
    known = {curve.variant for curve in curves}
    if left_out := [variant for variant in VARIANTS if variant not in known]:
        needed = "--memory-r, --time-d and --memory-d above 0"
        if flags.costs is not None:
            needed = f"more than {flags.costs} has: profile a run that recomputes, and give --host-bandwidth"
        yield f"left out: {', '.join(left_out)}, which need {needed}"


def _curves_as_json(flags: CurveFlags, limits: Sequence[float], curves: Sequence[_Curve]) -> str:
    points = []
    for curve in curves:
        for limit in limits:
            where = {"schedule": curve.schedule, "way": curve.variant, "memory_limit": limit * flags.pipeline_size}
            figures = curve.points.get(limit)
            known = {} if figures is None else figures.as_json()
            largest = {name: max(known[name]) if known else None for name in _FULLEST}
            points.append({**where, **{name: known.get(name) for name in _FIGURES}, **largest})
    return to_json(points)


def _curves_as_plot(flags: CurveFlags, curves: Sequence[_Curve]) -> str:
    fastest = _fastest(curves)
    series = []
    for curve in curves:
        if curve.points:
            values = {
                x: point.iteration_time / fastest.iteration_time if flags.dial else 100 * point.lost
                for x, point in curve.points.items()
            }
            shown = {x: value for x, value in values.items() if not flags.dial or value <= _LONGEST}
            series.append(Series(curve.name, tuple((shown or values).items())))
    y_label = "bubble rate (%)" if flags.recomputation is Recompute.NONE else "bubble and recomputation (%)"
    return to_plot(
        series,
        title=f"{flags.pipeline_size} ranks, {flags.num_microbatches} microbatches",
        x_label="memory limit (p M_B)",
        y_label="time relative to the fastest plan that keeps everything" if flags.dial else y_label,
        y_from=1 if flags.dial else 0,
    )
