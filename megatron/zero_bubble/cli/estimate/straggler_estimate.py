"""`zero-bubble estimate stragglers`: what a straggler costs under synchronous, local and hierarchical SGD.

    zero-bubble estimate stragglers --num-replicas 8 --slowdown 5 --hierarchical-sgd 2:2,4:4,8:8
    zero-bubble estimate stragglers --straggler fixed --probability 0.1 --time-step 350 --time-average 40
    zero-bubble estimate stragglers --plot time.svg --timeline steps.svg

In each step at most one replica straggles. Replicas of synchronous SGD wait for it in every step. With local SGD all
replicas average every N steps, and none waits in between. With hierarchical SGD the groups of --hierarchical-sgd
average; their periods are scaled so that the longest is N. The table shows the mean time of a step for each N. It
says nothing about convergence: the longer replicas step alone, the more their parameters differ.

A mistake ends with one line and exit status 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.cli.estimate.replica_lanes import to_replica_lanes
from megatron.zero_bubble.cli.estimate.straggler_flags import StragglerFlags
from megatron.zero_bubble.cli.estimate.stragglers import scaled, simulate_replicas, time_per_step
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.cli.output import deliver, table
from megatron.zero_bubble.schedule.draw import Series, to_plot
from megatron.zero_bubble.schedule.hierarchy import Hierarchy, Level


@dataclass(frozen=True)
class _Row:
    """Times of a step with one period of averaging all replicas; None where the levels have no such periods."""

    period: int
    local: float
    hierarchical: float | None
    levels: Hierarchy | None


def estimate_stragglers(argv: Sequence[str]) -> None:
    """Print the table, and draw what the flags ask for."""
    flags = read_flags(StragglerFlags, argv, "zero-bubble estimate stragglers", __doc__ or "")
    times = [[time * flags.time_step for time in step] for step in flags.stragglers.times(flags.steps)]
    synchronous = time_per_step(times, None, flags.time_average)
    rows = [_row(flags, times, period) for period in sorted(set(flags.periods))]
    if flags.plot is not None:
        deliver(_plot(flags, synchronous, rows), flags.plot)
    if flags.timeline is not None:
        deliver(_timeline(flags, times[: flags.timeline_steps]), flags.timeline)
    flags.deliver(_json(synchronous, rows), _table(flags, synchronous, rows))


def _row(flags: StragglerFlags, times: Sequence[Sequence[float]], period: int) -> _Row:
    local = Hierarchy((Level(period, flags.num_replicas),))
    levels = scaled(flags.hierarchical_sgd, period)
    hierarchical = None if levels is None else time_per_step(times, levels, flags.time_average)
    return _Row(period, time_per_step(times, local, flags.time_average), hierarchical, levels)


def _text(levels: Hierarchy | None) -> str:
    return "-" if levels is None else ",".join(f"{level.period}:{level.group_size}" for level in levels.levels)


def _table(flags: StragglerFlags, synchronous: float, rows: Sequence[_Row]) -> str:
    cells = []
    for row in rows:
        speedups = [f"{synchronous / time:.2f}" if time else "-" for time in (row.local, row.hierarchical)]
        hierarchical = f"{row.hierarchical:.4g}" if row.hierarchical else "-"
        cells.append(
            (f"{row.period}", f"{synchronous:.4g}", f"{row.local:.4g}", hierarchical, *speedups, _text(row.levels))
        )
    heads = ("all average every", "synchronous", "local", "hierarchical", "local x", "hierarchical x", "levels")
    return table(heads, cells, markdown=flags.markdown)


def _json(synchronous: float, rows: Sequence[_Row]) -> dict[str, Any]:
    periods = [
        {
            "period": row.period,
            "local": row.local,
            "hierarchical": row.hierarchical,
            "levels": None if row.levels is None else _text(row.levels),
        }
        for row in rows
    ]
    return {"synchronous": synchronous, "periods": periods}


def _title(flags: StragglerFlags) -> str:
    often = "in each step" if flags.probability == 1 else f"with probability {flags.probability:g} in a step"
    return f"{flags.num_replicas} replicas, one {flags.straggler} straggler {often}, {flags.slowdown:g} times as slow"


def _plot(flags: StragglerFlags, synchronous: float, rows: Sequence[_Row]) -> str:
    curves = {
        "synchronous": [(row.period, synchronous) for row in rows],
        "local": [(row.period, row.local) for row in rows],
        "hierarchical": [(row.period, row.hierarchical) for row in rows if row.hierarchical],
    }
    series = [Series(name, tuple(points)) for name, points in curves.items() if points]
    return to_plot(
        series, title=_title(flags), x_label="steps between averagings of all replicas", y_label="mean time of a step"
    )


def _timeline(flags: StragglerFlags, times: Sequence[Sequence[float]]) -> str:
    methods = {"synchronous SGD": None, f"hierarchical SGD {_text(flags.hierarchical_sgd)}": flags.hierarchical_sgd}
    panels = {name: simulate_replicas(times, levels, flags.time_average) for name, levels in methods.items()}
    slow = {(step, replica) for step, each in enumerate(times) for replica, time in enumerate(each) if time > min(each)}
    return to_replica_lanes(panels, slow, title=_title(flags))
