"""Chooses the schedules and the placement of stages that the flags ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from megatron.zero_bubble.mcore.random_settings import RANDOM_SETTINGS
from megatron.zero_bubble.mcore.refusals import refuse_with_features
from megatron.zero_bubble.mcore.refused_settings import Feature
from megatron.zero_bubble.planner.memory_limit import MemoryLimit, in_peaks
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import Infeasible, OpKind, Placement, Schedule, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.formats import schedule_from_text
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b
from megatron.zero_bubble.schedule.ir import MAX_OPERATIONS, PlacementKind
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.aliases import pending_backwards
from megatron.zero_bubble.session.features import (
    check_copies,
    check_offload,
    check_pairs,
    plans_offload,
    takes_makespan,
)
from megatron.zero_bubble.session.files import read_file
from megatron.zero_bubble.session.flags import SCHEDULE_FILE, flag_name, limit_flag
from megatron.zero_bubble.session.job_flags import RECOMPUTATION, JobFlags
from megatron.zero_bubble.session.profiling import profile_window
from megatron.zero_bubble.session.progress_lines import announced


def choose_plan(flags: JobFlags) -> RunSchedules | None:
    """The `RunSchedules` that the flags ask for, before any schedule is made; None for megatron-core's own schedule.

    Raises:
        ValueError: the named schedule does not exist, or the number of ranks or chunks does not fit the schedule.
    """
    name = flags.schedule
    if name is None:
        return None
    num_ranks, num_chunks = flags.pipeline_model_parallel_size, flags.model_chunks
    if num_ranks < 2:
        by = f"--zero-bubble-schedule {name}" if flags.zero_bubble_schedule else "--zero-bubble"
        raise ValueError(f"{by} needs --pipeline-model-parallel-size of at least 2, got {num_ranks}")
    _check_recomputation(flags, name)
    check_offload(flags)
    check_pairs(flags)
    with _as_users_mistake(flags, name):
        if not name.startswith(SCHEDULE_FILE):
            kind = cast("PlacementKind | None", flags.zero_bubble_placement)
            plan = RunSchedules.named(name, num_ranks, num_chunks, kind)
            _check_group_size(flags, plan)
            if flags.rank == 0:
                plan = replace(plan, watch=announced)
            return plan.requesting(
                costs=_costs_before_measuring(flags, plan.placement),
                memory_limit=_limit_before_measuring(flags, plan.placement),
                group_size=group_size(flags, plan.placement),
                post_validation=flags.interlocks_iterations,
                takes_makespan=takes_makespan(flags, name),
                recomputes=(flags.recompute,),
                vocabulary_parallel=flags.vocabulary_parallel,
                pairs=flags.pairs,
                offloads=plans_offload(flags),
            )
        given = RunSchedules.of(_read(Path(name.removeprefix(SCHEDULE_FILE))))
        plan = given.requesting(recomputes=(flags.recompute,), vocabulary_parallel=flags.vocabulary_parallel)
        if plan.fixed_schedule is not None and plan.fixed_schedule.recomputes and flags.recompute is Recompute.NONE:
            raise ScheduleError(
                "the schedule has recomputations (R), which need --recompute-granularity full without fp8 and fp4"
            )
        if plan.placement.num_ranks != num_ranks:
            raise ScheduleError(f"the schedule is for {plan.placement.num_ranks} ranks")
        if num_chunks is not None and plan.placement.num_chunks != num_chunks:
            raise ScheduleError(f"the schedule is for {plan.placement.num_chunks} chunks a rank, not {num_chunks}")
        if plan.offloads:
            check_copies(flags, f"the copies of --zero-bubble-schedule {name}")
        return plan


def group_size(flags: JobFlags, placement: Placement) -> int | None:
    """Number of microbatches that a rank runs on a chunk before it runs the next chunk; None if the planner may choose.

    Without `--zero-bubble-seed-by-layer`, the random numbers of dropout and of `--moe-input-jitter-eps` depend on the
    order of the forwards of a rank. A job that draws such numbers and has interleaved chunks keeps megatron-core's
    order, and so draws the same random numbers as megatron-core. By default, megatron-core's microbatch group size
    equals the number of pipeline ranks.
    """
    given = flags.microbatch_group_size_per_virtual_pipeline_stage
    if given is None and placement.kind == "interleaved" and _draws_in_order(flags):
        return placement.num_ranks
    return given


def _check_group_size(flags: JobFlags, plan: RunSchedules) -> None:
    """Raise `ValueError` if the microbatch group size that megatron-core's flag sets is too small or too large."""
    name = "microbatch_group_size_per_virtual_pipeline_stage"
    size, ranks = getattr(flags, name), plan.placement.num_ranks
    if size is None or plan.placement.kind != "interleaved":
        return
    number = flags.num_microbatches(min(flags.batch_sizes))
    if size < ranks or (size > number >= ranks and not plan.adapts):
        most = "" if plan.adapts else f", and at most {number}, the number of microbatches"
        raise ValueError(f"{flag_name(name)} {size}: give at least {ranks}, the number of pipeline ranks{most}")


def _draws_in_order(flags: JobFlags) -> bool:
    """Whether forwards draw random numbers that depend on the order of the forwards of a rank."""
    draws = any(getattr(flags, name, None) or flags.given_model.get(name) for name in RANDOM_SETTINGS)
    return draws and not flags.zero_bubble_seed_by_layer


def other_numbers_line(flags: JobFlags, schedule: Schedule) -> str:
    """A log line if the memory limit changes the order of forwards and so their random numbers; else empty."""
    placement, size = schedule.placement, group_size(flags, schedule.placement)
    if placement.kind != "interleaved" or size is None or not _draws_in_order(flags):
        return ""
    try:
        own = interleaved_1f1b(
            placement.num_ranks, schedule.num_microbatches, num_chunks=placement.num_chunks, group_size=size
        )
    except ScheduleError:  # megatron-core has no schedule for this number of microbatches
        return ""
    orders = ([[op for op in ops if op.kind is OpKind.F] for ops in each.ops] for each in (schedule, own))
    if next(orders) == next(orders):
        return ""
    return (
        f" > {limit_flag(flags)}: megatron-core's order of forwards, in groups of {size} microbatches, needs more "
        "memory; in the planned order forwards draw other random numbers, unless --zero-bubble-seed-by-layer is given"
    )


def _check_recomputation(flags: JobFlags, name: str) -> None:
    """Raise `ValueError` if a flag contradicts `--zero-bubble-recompute planned`."""
    if flags.recompute is not Recompute.PLANNED:
        return
    given = f"{flag_name('zero_bubble_recompute')} {flags.zero_bubble_recompute}"
    for field in RECOMPUTATION:
        value = getattr(flags, field)
        if value is not None:
            raise ValueError(f"{given} lets the schedule choose recomputation: leave out {flag_name(field)} {value}")
    refuse_with_features(flags, [Feature.PLANNED_RECOMPUTATION])
    if name.startswith(SCHEDULE_FILE):
        raise ValueError(
            f"{given} plans a schedule, but --zero-bubble-schedule {name} gives one: leave one of them out"
        )


def check_number(flags: JobFlags, plan: RunSchedules) -> None:
    """Raise `ValueError` if the run has so many microbatches that planning its schedules would take minutes."""
    sizes, stages = flags.batch_sizes, plan.placement.num_stages
    # The formula of an arithmetic series, because adding up a long range takes too much time.
    total = len(sizes) * (sizes[0] + sizes[-1]) // 2 if isinstance(sizes, range) else sum(sizes)
    microbatches = total // (flags.micro_batch_size * flags.data_parallel_size)
    most = MAX_OPERATIONS // (3 * stages)
    if plan.fixed_schedule is None and microbatches > most:
        given = f"--global-batch-size {flags.global_batch_size} --micro-batch-size {flags.micro_batch_size}"
        many = f"{microbatches} microbatches"
        if flags.step_batch_sizes is not None:
            given = f"--step-batch-size-schedule with sizes {' '.join(map(str, sizes))}"
        if flags.rampup_batch_size:
            given += f" --rampup-batch-size {' '.join(map(str, flags.rampup_batch_size))}"
            many = f"iterations of every size, {many} in all,"
        raise ValueError(f"{given}: {many} are too many to plan schedules for {stages} stages: at most {most}")


def make_schedules(flags: JobFlags, plan: RunSchedules) -> None:
    """Make all schedules that the run needs, and keep the schedules in `plan`.

    Raises:
        ValueError: for some number of microbatches, no schedule exists, or no schedule fits the memory limit.
    """
    with _as_users_mistake(flags, str(flags.schedule)):
        for size in flags.batch_sizes:
            plan.schedule(flags.num_microbatches(size))
        if plan.fixed_schedule is not None:
            if plan.fixed_schedule.has_post_validation and not flags.zero_bubble_post_validation:
                raise ScheduleError("the schedule's operations STEP and VALIDATE need --zero-bubble-post-validation")
            _check_memory(flags, plan)


@contextmanager
def _as_users_mistake(flags: JobFlags, name: str) -> Iterator[None]:
    """Turn a planning error into a `ValueError` that names the flag to change."""
    try:
        yield
    except Infeasible as error:
        raise ValueError(
            f"{limit_flag(flags)}: schedule {name} needs {_multiple(flags, error.smallest_limit)}"
        ) from error
    except ScheduleError as error:
        raise ValueError(f"--zero-bubble-schedule {name}: {error}") from error


def _limit_before_measuring(flags: JobFlags, placement: Placement) -> float | None:
    """The memory limit in M_B for plans without measured costs; None if the schedule has its own memory limit."""
    limit = flags.memory_limit
    if limit is None:
        return None
    in_unit_costs = limit.in_unit_costs(placement, flags.most_microbatches, flags.recompute)
    if in_unit_costs is None and not flags.has_own_limit:
        # A limit in bytes cannot be used before memory is measured: begin with 1F1B's peak.
        return MemoryLimit(multiple=1.0).in_unit_costs(placement, placement.num_ranks, flags.recompute)
    return in_unit_costs


_ASSUMED_EXCHANGE = 0.3
"""Fraction of the times of F and B that the token exchange between experts takes; assumed until it is measured."""


def _costs_before_measuring(flags: JobFlags, placement: Placement) -> StageCosts | None:
    """Costs of the stages for plans before the first measurement; None if the planner's default costs suffice.

    If the job profiles iterations and may run F and B as one operation, the costs include the all-to-all of experts, so
    that the plans for the profiled iterations run F and B as one operation. If the job recomputes activations, the
    costs include the number of blocks that a stage can recompute.
    """
    if flags.pairs and profile_window(flags) is not None:
        costs = default_costs(placement)
        f, b = (tuple(_ASSUMED_EXCHANGE * time for time in times) for times in (costs.time_f, costs.time_b))
        return replace(costs, all_to_all_f=f, all_to_all_b=b)
    if flags.recompute is Recompute.NONE:
        return None
    costs = default_costs(placement, flags.recompute, vocabulary_parallel=flags.vocabulary_parallel)
    blocks = flags.num_layers // (placement.num_stages * flags.layers_of_block)
    return replace(costs, num_blocks=(blocks,) * placement.num_stages)


def _check_memory(flags: JobFlags, plan: RunSchedules) -> None:
    """Raise `Infeasible` if the schedule from the user's file needs more memory than the memory limit.

    A limit in bytes cannot be checked before memory is measured.
    """
    assert plan.fixed_schedule is not None
    schedule = plan.schedule(plan.fixed_schedule.num_microbatches)
    limit = None
    if flags.memory_limit is not None:
        limit = flags.memory_limit.in_unit_costs(schedule.placement, schedule.num_microbatches, plan.recompute)
    peak = max(peak_memory(schedule, default_costs(schedule.placement, plan.recompute)))
    if limit is not None and peak > limit * (1 + 1e-9):
        raise Infeasible("it does not fit under the limit", peak)


def _multiple(flags: JobFlags, smallest: float) -> str:
    """Return text with the memory limit `smallest` (in M_B), converted to the unit of the flag that sets the limit.

    For example, the text is `at least 1.25 times 1F1B's peak`, or `at least 5` for a limit on pending backwards.
    """
    num_ranks = flags.pipeline_model_parallel_size
    placement = Placement("linear", num_ranks)
    peak = MemoryLimit(multiple=1.0).in_unit_costs(placement, flags.most_microbatches, flags.recompute)
    assert peak is not None
    if pending_backwards(flags.zero_bubble_memory_limit or "") is not None:
        return f"at least {math.ceil(smallest / peak * num_ranks - 1e-9)}"
    return f"at least {in_peaks(smallest / peak)}"


def choose_placement(flags: JobFlags, plan: RunSchedules | None) -> Placement:
    """The plan's placement of stages; without a plan, the placement of megatron-core's own schedule."""
    if plan is not None:
        return plan.placement
    num_chunks = flags.model_chunks or 1
    return Placement("interleaved" if num_chunks > 1 else "linear", flags.pipeline_model_parallel_size, num_chunks)


def _read(path: Path) -> Schedule:
    try:
        return schedule_from_text(read_file(path), name=path.stem)
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot be read: {error}") from None
