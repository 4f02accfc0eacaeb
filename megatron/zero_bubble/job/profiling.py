"""Flags of profiling and planning, and the block that is logged when a plan is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from megatron.zero_bubble.job.files import write_file
from megatron.zero_bubble.runtime.planning import MemoryLimit
from megatron.zero_bubble.runtime.replanner import PlanningOptions, Report
from megatron.zero_bubble.schedule import Placement, ScheduleError
from megatron.zero_bubble.schedule.formats import Profile, Setting, profile_from_json, profile_to_json
from megatron.zero_bubble.training.arguments import Arguments, ZeroBubbleFlags

_DEFAULT_WINDOW = (3, 6)
_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *(
        "seq_length",
        "micro_batch_size",
        "bf16",
        "fp16",
        "swiglu",
        "num_experts",
        "mtp_num_layers",
        "moe_router_topk",
        "moe_grouped_gemm",
        "transformer_impl",
    ),
    *("tensor_model_parallel_size", "expert_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
)
"""What the costs of a stage depend on."""


def check_zero_bubble_flags(flags: ZeroBubbleFlags) -> None:
    """Refuse what can be seen to be wrong without knowing the model.

    Raises:
        ValueError: the first flag found that cannot work.
    """
    names = (
        *("memory_limit", "max_pending_backward", "profile_iters", "profile_output", "profile_input"),
        *("timeline", "timeline_iters", "strict", "timeout", "post_validation", "replan_threshold"),
        "communicator",
    )
    for name in names:
        # Zero equals False: it is what a threshold is by default.
        if not flags.asks_for_schedule and getattr(flags, f"zero_bubble_{name}") not in (None, False):
            raise ValueError(f"--zero-bubble-{name.replace('_', '-')} needs --zero-bubble or --zero-bubble-schedule")
    _check_v_schedule(flags)
    for name in ("rollback", "rollback_on_host"):
        if not flags.zero_bubble_post_validation and getattr(flags, f"zero_bubble_{name}"):
            raise ValueError(f"--zero-bubble-{name.replace('_', '-')} needs --zero-bubble-post-validation")
    if flags.zero_bubble_rollback == "inverse" and flags.zero_bubble_rollback_on_host:
        raise ValueError("--zero-bubble-rollback-on-host and --zero-bubble-rollback inverse: the inverse keeps no copy")
    threshold = flags.zero_bubble_replan_threshold
    if not 0 <= threshold < math.inf:
        raise ValueError(f"--zero-bubble-replan-threshold must be at least 0, got {threshold}")
    if flags.zero_bubble_timeline_iters is not None:
        first, last = flags.zero_bubble_timeline_iters
        if not 1 <= first <= last:
            raise ValueError(f"--zero-bubble-timeline-iters {first} {last}: give the first and the last iteration")


def _check_v_schedule(flags: ZeroBubbleFlags) -> None:
    schedule, setup, stands_for = flags.zero_bubble_schedule, flags.zero_bubble_v_schedule_mem_setup, flags.v_schedule
    if setup is not None and stands_for is None:
        raise ValueError(f"--zero-bubble-v-schedule-mem-setup {setup} needs --zero-bubble-v-schedule")
    if stands_for is not None and schedule not in (None, stands_for):
        raise ValueError(
            f"--zero-bubble-schedule {schedule} and --zero-bubble-v-schedule, which is {stands_for}: give one of them"
        )


def memory_limit(args: Arguments) -> MemoryLimit | None:
    """The limit that the flags set; None for the schedule's own.

    Raises:
        ValueError: it cannot be read, or two flags set it.
    """
    text, pending = args.zero_bubble_memory_limit, args.zero_bubble_max_pending_backward
    if text is not None and pending is not None:
        raise ValueError("give --zero-bubble-memory-limit or --zero-bubble-max-pending-backward, not both")
    flag = "--zero-bubble-memory-limit"
    if pending is not None:
        flag, text = "--zero-bubble-max-pending-backward", pending
        if pending != "auto":
            if not pending.isdigit() or pending == "0":
                raise ValueError(f"{flag} {pending} is neither auto nor a number of forwards")
            return MemoryLimit(multiple=int(pending) / args.pipeline_model_parallel_size)
    if text is None:
        return MemoryLimit(multiple=1.0) if args.schedule == "auto" else None
    try:
        return MemoryLimit.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def check_memory_limit(args: Arguments, has_cuda: bool) -> None:
    """Raise `ValueError` for a limit that only a device knows, where the job has none."""
    if memory_limit(args) == MemoryLimit() and not has_cuda:
        given = args.zero_bubble_memory_limit is not None
        flag = "--zero-bubble-memory-limit" if given else "--zero-bubble-max-pending-backward"
        raise ValueError(f"{flag} auto asks the device what is free, and there is no CUDA: give a multiple or bytes")


def profile_window(args: Arguments) -> tuple[int, int] | None:
    """First and last profiled iteration, counted from the start of this job; None for no profiling.

    Raises:
        ValueError: the window is empty or backwards.
    """
    if args.zero_bubble_profile_iters is not None:
        first, last = args.zero_bubble_profile_iters
        flag = "--zero-bubble-profile-iters"
    else:
        first, last = args.zero_bubble_pipeline_timers_start_iter, args.zero_bubble_pipeline_timers_end_iter
        first = _DEFAULT_WINDOW[0] if first is None else first
        last = max(first, _DEFAULT_WINDOW[1]) if last is None else last
        flag = "--zero-bubble-pipeline-timers-start-iter, --zero-bubble-pipeline-timers-end-iter"
    if first == last == 0:
        return None
    if not 1 <= first <= last:
        raise ValueError(f"{flag} {first} {last}: give the first and the last iteration, counted from 1, or 0 0")
    return first, last


def planning_options(args: Arguments, placement: Placement) -> PlanningOptions | None:
    """How this run profiles and plans; None if it does neither.

    Raises:
        ValueError: a flag is wrong, or the profile given does not fit the run.
    """
    window, limit = profile_window(args), memory_limit(args)
    profile = _read_profile(args, placement)
    if profile is None:
        _check_measured(args, window, limit)
        if window is None:
            return None
    first, last = window or (0, 0)
    return PlanningOptions(
        first_step=first,
        last_step=last,
        model=model_description(args),
        memory_limit=limit,
        profile=profile,
        threshold=args.zero_bubble_replan_threshold,
    )


def _check_measured(args: Arguments, window: tuple[int, int] | None, limit: MemoryLimit | None) -> None:
    """Refuse flags that do nothing without measured costs, where the flags alone say that there will be none."""
    output, threshold = args.zero_bubble_profile_output, args.zero_bubble_replan_threshold
    output_flag = f"--zero-bubble-profile-output {output}"
    if window is not None:
        steps = _num_steps(args, iteration=0)
        if output is not None and steps is not None and steps < window[1]:
            raise ValueError(
                f"{output_flag} is written after iteration {window[1]} of a job, the last that it profiles, but this "
                f"one has {steps}: give --zero-bubble-profile-iters START END with an END of at most {steps}"
            )
        return
    idle = {output_flag: output is not None, f"--zero-bubble-replan-threshold {threshold}": threshold > 0}
    if limit is not None and limit.multiple is None:
        # A multiple of 1F1B's peak is planned with before anything is measured.
        text, pending = args.zero_bubble_memory_limit, args.zero_bubble_max_pending_backward
        idle[f"--zero-bubble-memory-limit {text}" if text else f"--zero-bubble-max-pending-backward {pending}"] = True
    if given := [flag for flag, is_given in idle.items() if is_given]:
        raise ValueError(
            f"{given[0]} needs measured costs, and --zero-bubble-profile-iters 0 0 measures none: "
            "give another START END, or --zero-bubble-profile-input FILE"
        )


def _num_steps(args: Arguments, iteration: int) -> int | None:
    """How many iterations a job does at most that begins after `iteration`; None if its flags do not say.

    Megatron-LM's own scripts may count samples instead.
    """
    if args.train_iters is None:
        return None
    left = args.train_iters - iteration
    if args.exit_interval:
        left = min(left, args.exit_interval - iteration % args.exit_interval)
    return max(0, left)


def too_short_to_profile(args: Arguments) -> str | None:
    """What to tell a user whose job ends before its profile does, `args.iteration` being the one it begins after."""
    window, steps = profile_window(args), _num_steps(args, args.iteration)
    if window is None or args.zero_bubble_profile_input is not None or not steps or window[1] <= steps:
        return None
    draws_after_it = args.zero_bubble_timeline is not None and args.zero_bubble_timeline_iters is None
    missing = ["no plan from measured times"]
    missing += ["no --zero-bubble-profile-output"] if args.zero_bubble_profile_output is not None else []
    missing += ["no --zero-bubble-timeline"] if draws_after_it else []
    return (
        f" > {', '.join(missing)}: this job ends after {steps} iterations, its profile would after {window[1]}; "
        "--zero-bubble-profile-iters START END chooses them, 0 0 none"
    )


def model_description(args: Arguments) -> dict[str, Setting]:
    """What a profile is a profile of."""
    description = {name: getattr(args, name) for name in _MODEL}
    if not args.group_query_attention:
        description["num_query_groups"] = args.num_attention_heads  # Megatron-LM's arguments leave a 1 there
    return description


def _read_profile(args: Arguments, placement: Placement) -> Profile | None:
    if args.zero_bubble_profile_input is None:
        return None
    try:
        profile = profile_from_json(Path(args.zero_bubble_profile_input).read_text(encoding="utf-8"))
        profile.check_fits(placement, model_description(args))
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise ValueError(f"--zero-bubble-profile-input {args.zero_bubble_profile_input}: {error}") from error
    return profile


def reporter(args: Arguments, say: Callable[[str], None]) -> Callable[[Report], None]:
    """What to do with a plan: print the block, and save the profile if asked to."""

    def report(found: Report) -> None:
        say(describe(found))
        if args.zero_bubble_profile_output is not None and args.rank == 0:
            output = args.zero_bubble_profile_output
            try:
                write_file(output, profile_to_json(found.prediction.profile))
            except OSError as error:
                raise OSError(f"--zero-bubble-profile-output {output}: cannot be written: {error.strerror}") from error

    return report


def describe(report: Report) -> str:
    """The block: costs per stage, the schedule, what it should do."""
    prediction = report.prediction
    profile, schedule = prediction.profile, prediction.schedule
    costs, placement = profile.costs, profile.placement
    source = f"measured up to step {report.step}, spread {profile.noise:.1%}" if report.step else "from a profile"
    lines = [f" > zero-bubble plan; times {source}"]
    lines.append("     stage  rank    F (ms)    B (ms)    W (ms)  to next (ms)  kept by F (MiB)  for W (MiB)")
    for stage in range(costs.num_stages):
        to_next = f"{costs.time_comm[stage]:12.2f}" if stage + 1 < costs.num_stages else " " * 12
        lines.append(
            f"     {stage:5d} {placement.rank_of(stage):5d} {costs.time_f[stage]:9.2f} {costs.time_b[stage]:9.2f} "
            f"{costs.time_w[stage]:9.2f}  {to_next} {_mib(costs.memory_f[stage]):16.1f} "
            f"{_mib(-costs.memory_w[stage]):12.1f}"
        )
    made = "planned" if report.is_new_plan else "kept"
    limits = report.memory_limit or ()
    limit = f", memory limit {' '.join(f'{_mib(one):.1f}' for one in dict.fromkeys(limits))} MiB" if limits else ""
    lines.append(f"     schedule {schedule.name} ({made}) for {schedule.num_microbatches} microbatches{limit}")
    lines.append(
        f"     predicted: bubble rate {prediction.bubble_rate:.2%}, {prediction.milliseconds:.1f} ms, "
        f"{prediction.speed_up:.3f} times as fast as 1F1B"
    )
    peaks = ", ".join(f"{_mib(peak):.1f}" for peak in prediction.peak_bytes)
    lines.append(f"     peak activations of each rank (MiB): {peaks}")
    if any(profile.inside):
        inside = ", ".join(f"{_mib(profile.inside_rank(rank)):.1f}" for rank in range(placement.num_ranks))
        lines.append(f"     an operation needs while it runs, beyond that, on each rank (MiB): {inside}")
    if limits and any(peak > most * (1 + 1e-9) for peak, most in zip(prediction.peak_bytes, limits, strict=True)):
        lines.append("     that is above the memory limit, which this schedule does not adapt to")
    return "\n".join(lines)


def _mib(num_bytes: float) -> float:
    return num_bytes / 2**20
