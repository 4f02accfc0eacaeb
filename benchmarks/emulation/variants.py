"""Plans the schedules of an emulated run, and variants of these schedules for comparison."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.emulation.arguments import EmulationFlags
from megatron.zero_bubble.cli.schedule.planned_figures import figures_of_all
from megatron.zero_bubble.cli.shared_flags import single_or_per_rank
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.registry import entry_of
from megatron.zero_bubble.schedule import ScheduleError, StageCosts, Timeline, simulate
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.kinds import PAIRED
from megatron.zero_bubble.schedule.recomputation import Recompute

_UNPLANNED = {Recompute.NONE: "nothing recomputed", Recompute.FULL: "everything recomputed"}
"""Recomputation -> suffix in the name of a variant that is compared with planned recomputation."""


def contestants(flags: EmulationFlags) -> list[Timeline]:
    """Return the simulated plans of all schedules and variants that run.

    A schedule that recomputes all activations in R is followed by a variant that recomputes them in B. A schedule with
    planned recomputation is followed by variants with no and with full recomputation under the same memory limit, if
    possible. A schedule that copies activations to the host is followed by a variant without a memory limit. A schedule
    with pairs that the planner chose is followed by a variant without pairs.

    Raises:
        ScheduleError: a schedule is unknown, or impossible with the sizes in the flags.
    """
    plans = _plans(flags, flags.schedule)
    if flags.recomputation is Recompute.FULL:
        return [variant for plan in plans for variant in (plan, _recomputing_in_backward(flags, plan))]
    if flags.recomputation is Recompute.PLANNED and not flags.offloads:
        return [variant for plan in plans for variant in (plan, *_unplanned(flags, plan))]
    if flags.offloads:
        return [variant for plan in plans for variant in (plan, _without_limit(flags, plan))]
    return [variant for plan in plans for variant in (plan, *_without_pairs(flags, plan))]


def _plans(flags: EmulationFlags, names: list[str] | None) -> list[Timeline]:
    return [one.timeline for one in figures_of_all(flags, names, flags.memory_limit, leaves_out_slow=True)]


def _with_costs(
    flags: EmulationFlags, plan: Timeline, costs: StageCosts, words: str, *, takes_makespan: bool = False
) -> Timeline:
    """Plan the schedule of `plan` again with `costs` and without recomputation and pairs; `words` follow its name."""
    schedule = plan.schedule
    planned = generate(
        schedule.name,
        schedule.num_ranks,
        schedule.num_microbatches,
        costs=costs,
        num_chunks=schedule.num_chunks,
        placement_kind=schedule.placement.kind,
        memory_limit=single_or_per_rank(flags.memory_limit),
        group_size=flags.microbatch_group_size if schedule.placement.kind == "interleaved" else None,
        takes_makespan=takes_makespan,
    )
    return simulate(replace(planned, name=f"{schedule.name}, {words}"), costs)


def _recomputing_in_backward(flags: EmulationFlags, plan: Timeline) -> Timeline:
    """Return the variant of the schedule without R; its B takes the time of B and R."""
    return _with_costs(flags, plan, plan.costs.recomputing_in_backward(), "R in B")


def _without_limit(flags: EmulationFlags, plan: Timeline) -> Timeline:
    """Return the variant of the schedule that keeps all activations, with the schedule's default memory."""
    [variant] = _plans(replace(flags, offload=None, recompute=None, memory_limit=None), [plan.schedule.name])
    return replace(variant, schedule=replace(variant.schedule, name=f"{plan.schedule.name}, no limit"))


def _without_pairs(flags: EmulationFlags, plan: Timeline) -> Iterator[Timeline]:
    """Yield the variant of the plan in which no forward and backward run as a pair, if the planner chose any pair."""
    schedule = plan.schedule
    if not schedule.kinds.isdisjoint(PAIRED) and not entry_of(schedule.name).has_pairs:
        yield _with_costs(flags, plan, plan.costs, "no pairs", takes_makespan=True)


def _unplanned(flags: EmulationFlags, plan: Timeline) -> Iterator[Timeline]:
    for recompute, words in _UNPLANNED.items():
        name = f"{plan.schedule.name}, {words}"
        try:
            [variant] = _plans(replace(flags, recompute=recompute.value), [plan.schedule.name])
        except ScheduleError as error:
            print(f"{name} left out: {one_line(error)}", file=sys.stderr)
        else:
            yield replace(variant, schedule=replace(variant.schedule, name=name))
