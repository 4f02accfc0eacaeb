"""Generates or reads one schedule, or several schedules to compare, and computes the figures of each schedule."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.cli.schedule.arguments import SimulationFlags, SourceFlags
from megatron.zero_bubble.cli.schedule.figures import ScheduleFigures, simulated_figures, stage_costs
from megatron.zero_bubble.cli.shared_flags import PostValidationFlags, ScheduleFlags, single_or_per_rank
from megatron.zero_bubble.planner import PlanRequest, placement_for, schedule_of
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of
from megatron.zero_bubble.schedule import HardwareQueues, Infeasible, Schedule, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.formats import schedule_from_text
from megatron.zero_bubble.schedule.kinds import VOCABULARY
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.files import read_file, reading
from megatron.zero_bubble.session.flags import flag_name


def make_schedule(
    flags: ScheduleFlags, name: str, limit: Sequence[float] | None, **options: Any
) -> tuple[Schedule, float]:
    """Generate the schedule `name` under `limit` (in M_B); return the schedule and its generation time in seconds.

    Args:
        limit: the memory limit, as one number for all ranks or one number for each rank.
        options: further fields of the `PlanRequest`.
    """
    placement = placement_for(name, flags.pipeline_size, flags.num_chunks, flags.placement)
    costs = stage_costs(flags, placement)
    if flags.offloads and limit is None:
        raise ScheduleError("argument --offload auto needs --memory-limit: without a limit, nothing is offloaded")
    if (lacking := lacking_costs(flags, costs)) is not None:
        raise ScheduleError(lacking)
    start = time.perf_counter()
    request = PlanRequest(
        name,
        flags.num_microbatches,
        (placement,),
        costs,
        memory_limit=single_or_per_rank(limit),
        group_size=flags.microbatch_group_size,
        overlap_communication=flags.overlap_communication,
        recomputes=(flags.recomputation,),
        vocabulary_parallel=costs.has_vocabulary,
        pairs=costs.has_all_to_all,
        offloads=flags.offloads,
        **options,
    )
    try:
        schedule = schedule_of(request)
    except Infeasible as error:
        raise Infeasible(f"argument --memory-limit: {error}", error.smallest_limit) from None
    return schedule, time.perf_counter() - start


def lacking_costs(flags: ScheduleFlags, costs: StageCosts) -> str | None:
    """Return an error message if the chosen recomputation or offload frees no memory under `costs`; otherwise None."""
    for is_asked, flag, name, effect in (
        (flags.recomputation is not Recompute.NONE, f"--recompute {flags.recompute}", "memory_r", "dropped"),
        (flags.offloads, "--offload auto", "memory_d", "copied to the host"),
    ):
        if is_asked and not any(getattr(costs, name)):
            source = f"{flag_name(name)} is 0" if flags.costs is None else f"{flags.costs} has no {name}"
            return f"argument {flag}: {source}, so nothing can be {effect}"
    return None


def figures_of_source(flags: SimulationFlags, **options: Any) -> ScheduleFigures:
    """Simulate the schedule that --schedule or --input names; `options` are further fields of the `PlanRequest`."""
    schedule, seconds = source(flags, **options)
    if flags.lengths and len(flags.lengths) != schedule.num_microbatches:
        raise ScheduleError(
            f"argument --lengths: expected {schedule.num_microbatches} numbers, one for each microbatch, got "
            f"{len(flags.lengths)}"
        )
    if flags.lengths and schedule.has_post_validation:
        raise ScheduleError("argument --lengths: a schedule with post-validation is not simulated with lengths")
    return simulated_figures(
        flags,
        schedule,
        seconds,
        post_validation=flags.post_validation,
        steps=flags.steps,
        queues=flags.queues,
        lengths=[length * len(flags.lengths) / sum(flags.lengths) for length in flags.lengths],
    )


def source(flags: SourceFlags, **options: Any) -> tuple[Schedule, float]:
    """Return the schedule that `--schedule` or `--input` names, and the time of its generation in seconds.

    Args:
        options: further fields of the `PlanRequest` for the schedule of --schedule; unused with --input.

    Raises:
        ScheduleError: there is no such schedule, or the costs do not fit it, even if the command needs no costs.
        ValueError: the file of --input or --costs cannot be read, or its text has another format.
    """
    if flags.input is not None:
        with reading(f"argument --input {flags.input}"):
            schedule = schedule_from_text(read_file(flags.input), name=flags.input.stem)
        if stage_costs(flags, schedule.placement).has_vocabulary and schedule.kinds.isdisjoint(VOCABULARY):
            given = "--vocabulary-parallel" if flags.costs is None else f"--costs {flags.costs}"
            raise ScheduleError(
                f"argument {given}: has vocabulary shards, but {flags.input} is a schedule without them"
            )
        return schedule, 0.0
    assert flags.schedule is not None
    interlocks = isinstance(flags, PostValidationFlags) and flags.post_validation
    return make_schedule(flags, flags.schedule, flags.memory_limit, post_validation=interlocks, **options)


def figures_of_all(
    flags: ScheduleFlags,
    chosen: Sequence[str] | None,
    limit: Sequence[float] | None,
    *,
    leaves_out_slow: bool = False,
    post_validation: bool = False,
    queues: HardwareQueues | None = None,
) -> list[ScheduleFigures]:
    """Return the figures of the schedules named in `chosen` or, if `chosen` is None, of all possible schedules.

    Args:
        limit: the memory limit in M_B, as one number for all ranks or one number for each rank.
        leaves_out_slow: whether to skip schedules that are slow to generate; has no effect if `chosen` names schedules.

    Raises:
        ScheduleError: a schedule that was chosen by name is not possible, or no schedule is possible.
    """
    all_figures: list[ScheduleFigures] = []
    refusal: ScheduleError | None = None
    for name in chosen or [name for name in ENTRIES if not (leaves_out_slow and ENTRIES[name].is_slow)]:
        entry = entry_of(name)
        own = replace(
            flags,
            num_chunks=flags.num_chunks if entry.takes_num_chunks else None,
            placement=flags.placement if entry.takes_placement else None,
        )
        try:
            placement = placement_for(name, own.pipeline_size, own.num_chunks, own.placement)
            if placement.kind != "interleaved":
                own = replace(own, microbatch_group_size=None)
            planned = make_schedule(own, name, limit, post_validation=post_validation)
            all_figures.append(simulated_figures(own, *planned, post_validation=post_validation, queues=queues))
        except ScheduleError as error:
            refusal = error
            if chosen:
                break
    if refusal is not None and (chosen or not all_figures):
        raise refusal
    return all_figures
