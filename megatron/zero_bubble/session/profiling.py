"""Decides how a job measures costs and uses the costs in plans; prints each plan and saves the measured costs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.runtime.plan_report import PlanningOptions, Report
from megatron.zero_bubble.schedule import Placement, ScheduleError
from megatron.zero_bubble.schedule.costs import MESSAGE_COSTS
from megatron.zero_bubble.schedule.formats import Profile, profile_from_json, profile_to_json
from megatron.zero_bubble.schedule.model_costs import Partition
from megatron.zero_bubble.session.aliases import DEFAULT_WINDOW
from megatron.zero_bubble.session.features import advice_on_post_validation
from megatron.zero_bubble.session.files import read_file, reading, write_file
from megatron.zero_bubble.session.flags import limit_flag
from megatron.zero_bubble.session.hybrid_pattern import undivided
from megatron.zero_bubble.session.job_flags import LAYOUT_SETTINGS, SEEN_IN_COSTS, JobFlags
from megatron.zero_bubble.session.layers import WITHOUT_PARTITION
from megatron.zero_bubble.session.profiled_costs import partition_of_profile
from megatron.zero_bubble.session.reports import describe_plan, print_rank_0
from megatron.zero_bubble.session.start_up import writing


def check_memory_limit(flags: JobFlags, has_cuda: bool) -> None:
    """Raise `ValueError` if the memory limit is a CUDA device's free memory but the job has no CUDA devices."""
    limit = flags.memory_limit
    if limit is not None and limit.is_auto and not has_cuda:
        raise ValueError(
            f"{limit_flag(flags)} needs a CUDA device, and there is none: give a multiple (1.5) or bytes (40GiB)"
        )


def profile_window(flags: JobFlags) -> tuple[int, int] | None:
    """First and last iteration to profile, counted from the start of this job; None if no iteration is profiled."""
    first, last = flags.zero_bubble_profile_iters or DEFAULT_WINDOW
    return (first, last) if last > 0 else None


def planning_options(
    flags: JobFlags,
    placement: Placement,
    partition: Partition,
    *,
    chooses_layout: bool = False,
    profile: Profile | None = None,
) -> PlanningOptions:
    """The `PlanningOptions` of the job; the defaults if the job neither measures costs nor plans from a profile.

    Args:
        partition: the number of layers of every stage of the job. The flags cannot give the partition: they may contain
            both a layout and the flags from which `job_settings` made the layout.
        chooses_layout: whether the job, or the job whose checkpoint it loads, chooses the layout from costs of layers.
        profile: the profile from `--zero-bubble-profile-input`; None without this flag, or if a layout was chosen that
            differs from the profile's layout.

    Raises:
        ValueError: a flag needs measured costs but the job measures no costs, or the profile does not fit the job.
    """
    window, limit = profile_window(flags), flags.memory_limit
    if profile is not None and not chooses_layout:
        with _reading_profile(flags):
            if profile.costs.has_vocabulary != flags.vocabulary_parallel:
                theirs, ours, value = (
                    ("with", "none", "on") if profile.costs.has_vocabulary else ("without", "them", "off")
                )
                raise ScheduleError(
                    f"the profile was measured {theirs} vocabulary shards, this run has {ours}: give "
                    f"--zero-bubble-vocabulary-parallel {value}"
                )
            model = {name: value for name, value in flags.model.items() if name not in SEEN_IN_COSTS}
            if (profile.placement, partition_of_profile(profile)) == (placement, partition):
                for name in ("pipeline_model_parallel_layout", *WITHOUT_PARTITION):
                    model.pop(name, None)  # different flags can give the stages the same layers
            profile.check_fits(placement, model, flags.recompute)
    if profile is None:
        _check_measured(flags, window, None if chooses_layout else limit)
        if window is None:
            return PlanningOptions()
    first, last = window or (0, 0)
    return PlanningOptions(
        first_step=first,
        last_step=last,
        model=flags.model,
        memory_limit=limit,
        profile=profile,
        threshold=flags.zero_bubble_replan_threshold,
    )


def _check_measured(flags: JobFlags, window: tuple[int, int] | None, limit: MemoryLimit | None) -> None:
    """Raise `ValueError` for flags that need measured costs if other flags prevent the measurement.

    `limit` is None if the memory limit needs no measurement, because the layout is chosen under the limit.
    """
    output, threshold = flags.zero_bubble_profile_output, flags.zero_bubble_replan_threshold
    output_flag = f"--zero-bubble-profile-output {output}"
    if window is not None:
        steps = flags.num_iterations(0)
        if output is not None and steps is not None and steps < window[1]:
            raise ValueError(
                f"{output_flag} is written after the last profiled iteration, which is {window[1]}, but the job ends "
                f"after {steps}: give --zero-bubble-profile-iters START END with an END of at most {steps}"
            )
        return
    for flag, needs_costs in (
        (output_flag, output is not None),
        (f"--zero-bubble-replan-threshold {threshold}", threshold > 0),
        (limit_flag(flags), limit is not None and limit.multiple is None),  # a multiple of 1F1B's peak needs no costs
    ):
        if needs_costs:
            raise ValueError(
                f"{flag} needs measured costs, and --zero-bubble-profile-iters 0 0 measures none: "
                "give another START END, or --zero-bubble-profile-input FILE"
            )


def restored_text(flags: JobFlags, planning: PlanningOptions, folder: str) -> str:
    """Log lines of a job that restores its layout from `folder`: the layout's origin, and flags without effect."""
    lines = [f" > layout: that of the checkpoint in --load {folder}"]
    profile, limit = flags.zero_bubble_profile_input, flags.memory_limit
    if profile is not None and planning.profile is None:
        lines.append(f" > --zero-bubble-profile-input {profile} has no effect: it was measured with another layout")
    if not planning.has_costs and limit is not None and limit.multiple is None:
        lines.append(
            f" > {limit_flag(flags)}: schedules keep to 1F1B's peak, because --zero-bubble-profile-iters 0 0 measures "
            "no costs"
        )
    if (unit_costs := flags.zero_bubble_unit_costs_output) is not None:
        lines.append(f" > --zero-bubble-unit-costs-output {unit_costs} is not written: no layers are measured")
    return "\n".join(lines)


def too_short_to_profile(flags: JobFlags, iteration: int) -> str | None:
    """A warning for a job that continues after `iteration` and ends before its profile is complete; otherwise None."""
    window, steps = profile_window(flags), flags.num_iterations(iteration)
    if window is None or flags.zero_bubble_profile_input is not None or not steps or window[1] <= steps:
        return None
    missing = "no plan from measured times"
    if flags.zero_bubble_profile_output is not None:
        missing += ", no --zero-bubble-profile-output"
    if flags.zero_bubble_timeline is not None and flags.zero_bubble_timeline_iters is None:
        missing += ", no --zero-bubble-timeline"
    return (
        f" > {missing}: this job ends after {steps} iterations, but profiling ends after {window[1]}; "
        "give --zero-bubble-profile-iters START END with an earlier END, or 0 0 for no profile"
    )


def unused_window(flags: JobFlags, planning: PlanningOptions) -> str | None:
    """A log line if a given profile replaces the measurement that `--zero-bubble-profile-iters` asks for; else None."""
    window = flags.zero_bubble_profile_iters
    if planning.profile is None or window is None or profile_window(flags) is None:
        return None
    return (
        f" > --zero-bubble-profile-iters {' '.join(map(str, window))}: no iteration is profiled, because "
        f"--zero-bubble-profile-input {flags.zero_bubble_profile_input} has the costs"
    )


def given_profile(flags: JobFlags) -> Profile | None:
    """The profile from `--zero-bubble-profile-input`, whose layout may differ from the job's; None without this flag.

    Raises:
        ValueError: the profile cannot be read, is damaged, or was measured with another model.
    """
    if flags.zero_bubble_profile_input is None:
        return None
    with _reading_profile(flags):
        profile = profile_from_json(read_file(flags.zero_bubble_profile_input))
        model = {name: value for name, value in flags.model.items() if name not in LAYOUT_SETTINGS}
        profile.check_fits(profile.placement, model)
        measured = profile.model.get("hybrid_layer_pattern")
        theirs, ours = undivided(None if measured is None else str(measured)), undivided(flags.hybrid_layer_pattern)
        if theirs != ours:
            raise ScheduleError(f"the profile was measured with hybrid_layer_pattern {theirs}, this run has {ours}")
        partition_of_profile(profile)  # raises an error for a damaged partition now
    return profile


def _reading_profile(flags: JobFlags) -> AbstractContextManager[None]:
    return reading(f"--zero-bubble-profile-input {flags.zero_bubble_profile_input}")


def report_plan(flags: JobFlags, report: Report) -> None:
    """On rank 0, print a description of a plan, and write the plan's profile if the flags name an output file.

    Raises:
        SessionError: the file cannot be written.
    """
    print_rank_0(describe_plan(report))
    if advice := advice_on_post_validation(flags, report.prediction):
        print_rank_0(advice)
    output, profile = flags.zero_bubble_profile_output, report.prediction.profile
    if output is not None and flags.rank == 0:
        if (costs := report.prediction.baseline_costs) not in (None, profile.costs):
            profile = replace(profile, messages={name: getattr(costs, name) for name in MESSAGE_COSTS})
        with writing("--zero-bubble-profile-output", output):
            write_file(output, profile_to_json(profile))
