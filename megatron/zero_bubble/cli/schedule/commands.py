"""The commands of `zero-bubble schedule`, each a function that prints or writes its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.cli.output import deliver, percent, table, table_of
from megatron.zero_bubble.cli.schedule.arguments import (
    CompareFlags,
    CurveFlags,
    DrawFlags,
    GenerateFlags,
    SimulateFlags,
    ValidateFlags,
)
from megatron.zero_bubble.cli.schedule.figures import ScheduleFigures, num_messages, stage_costs
from megatron.zero_bubble.cli.schedule.memory_curve import memory_curve
from megatron.zero_bubble.cli.schedule.planned_figures import figures_of_all, figures_of_source, source
from megatron.zero_bubble.cli.shared_flags import ResultFlags
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Schedule, ScheduleError, lower, validate, with_post_validation
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw import to_chrome_trace, to_html, to_svg
from megatron.zero_bubble.schedule.formats import (
    schedule_to_csv,
    schedule_to_grid,
    schedule_to_json,
    schedule_to_pytorch_csv,
)
from megatron.zero_bubble.schedule.host_link import offloaded_share
from megatron.zero_bubble.schedule.step_ops import operation_name


def list_schedules(flags: ResultFlags) -> None:
    """Print the name and a one-line summary of every available schedule."""
    width = max(map(len, ENTRIES))
    rows = [
        {"schedule": name, "placement": entry.placement, "num_chunks": entry.num_chunks, "summary": entry.summary}
        for name, entry in ENTRIES.items()
    ]
    flags.deliver(rows, "".join(f"{name:<{width}}  {entry.summary}\n" for name, entry in ENTRIES.items()))


def write_schedule(flags: GenerateFlags) -> None:
    """Print or write one schedule in the format that the flags name."""
    schedule, _ = source(flags)
    if flags.post_validation:
        schedule = with_post_validation(schedule, stage_costs(flags, schedule.placement))
    if flags.lower:
        schedule = lower(schedule, costs=stage_costs(flags, schedule.placement))
    validate(schedule)
    writers: dict[str, Callable[[Schedule], str]] = {
        "grid": schedule_to_grid,
        "json": schedule_to_json,
        "csv": schedule_to_csv,
        "pytorch": schedule_to_pytorch_csv,
    }
    deliver(writers[flags.chosen_format](schedule), flags.output)


def show_simulation(flags: SimulateFlags) -> None:
    """Print the costs of one schedule, and the causes of each rank's bubble."""
    figures = figures_of_source(flags)
    idle = causes(figures.timeline)
    rows = []
    for rank, peak in enumerate(figures.timeline.peaks):
        values = (figures.timeline.spans[rank], *(cause[rank] for cause in idle.values()), peak.amount)
        op = operation_name(peak.op, figures.schedule.num_microbatches, figures.steps) if peak.op else ""
        rows.append((str(rank), *(f"{float(value):.6g}" for value in values), op))
    ranks = table(("rank", "span", *idle, "memory (M_B)", "peak in"), rows)
    flags.deliver(figures.as_json(), f"{_summary([figures])}\n{ranks}")


def compare(flags: CompareFlags) -> None:
    """Print the costs of several schedules as a table with a row for each schedule."""
    all_figures = figures_of_all(
        flags, flags.schedule, flags.memory_limit, post_validation=flags.post_validation, queues=flags.queues
    )
    flags.deliver([figures.as_json() for figures in all_figures], _summary(all_figures, markdown=flags.markdown))


def _summary(all_figures: list[ScheduleFigures], *, markdown: bool = False) -> str:
    columns: dict[str, Callable[[ScheduleFigures], str]] = {
        "schedule": lambda each: each.schedule.name,
        "idle": lambda each: percent(each.timeline.idle.total),
        "imbalance": lambda each: percent(each.timeline.idle.imbalance),
        "bubble": lambda each: percent(each.timeline.idle.bubble),
        "cost": lambda each: f"{float(each.timeline.cost):.6g}",
        "above bound": lambda each: percent(each.above_bound),
        "makespan": lambda each: f"{float(each.timeline.makespan):.6g}",
        "memory (M_B)": lambda each: f"{max(each.peak_memory):.4g}",
        "messages": lambda each: str(each.num_messages),
        "generation": lambda each: f"{each.generation_seconds:.3f} s",
    }
    if any(figures.schedule.recomputes for figures in all_figures):
        columns["recomputed"] = lambda each: percent(each.recomputed)
        columns["bubble and R"] = lambda each: percent(each.lost)
        columns["cost with R in B"] = lambda each: (
            "-" if each.cost_in_backward is None else f"{float(each.cost_in_backward):.6g}"
        )
        columns["gain of R apart"] = lambda each: (
            "-" if each.cost_in_backward is None else percent(each.cost_in_backward / each.timeline.cost - 1)
        )
    if any(figures.schedule.offloads for figures in all_figures):
        columns["offloaded"] = lambda each: percent(offloaded_share(each.schedule))
        columns["host memory (M_B)"] = lambda each: f"{max(each.host_memory):.4g}"
    if any(figures.schedule.has_post_validation for figures in all_figures):
        columns["iteration"] = lambda each: f"{float(each.iteration_time):.6g}"
        columns["without"] = lambda each: f"{float(each.without_post_validation):.6g}"
        columns["gain"] = lambda each: percent(each.gain)
    return table_of(columns, all_figures, markdown=markdown)


def draw(flags: DrawFlags) -> None:
    """Write a picture of a schedule as SVG, as an HTML page, or as a trace for Perfetto."""
    output = flags.output
    if output.suffix not in (".svg", ".html", ".json"):
        raise ScheduleError(f"--output {output} must end in .svg, .html, or .json (for Perfetto)")
    timeline, steps = figures_of_source(flags).timeline, flags.steps
    if output.suffix == ".json":
        deliver(to_chrome_trace(timeline, steps=steps), output)
        return
    to_picture = to_svg if output.suffix == ".svg" else to_html
    deliver(to_picture(timeline, time_unit=flags.time_unit, steps=steps, width=flags.width), output)


def prove(flags: ValidateFlags) -> None:
    """Validate a schedule before and after lowering, and print its numbers of operations and messages."""
    schedule, _ = source(flags)
    validate(schedule)
    lowered = schedule if schedule.is_lowered else lower(schedule)
    validate(lowered)
    num_ops = sum(len(list(schedule.compute_ops(rank))) for rank in range(schedule.num_ranks))
    messages = num_messages(lowered)
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    flags.deliver(
        {"schedule": schedule.name, "valid": True, "operations": num_ops, "messages": messages},
        f"{schedule.name} is valid: {sizes}, {num_ops} operations, {messages} messages\n",
    )


@dataclass(frozen=True)
class ScheduleCommand:
    """One command of `zero-bubble schedule`, such as `simulate`."""

    run: Callable[[Any], None]
    flags: type
    summary: str
    example: str
    """Flags that follow `zero-bubble schedule COMMAND` in the example of `--help`."""


_SIZE = "--pipeline-size 4 --num-microbatches 8"

COMMANDS = {
    "list": ScheduleCommand(list_schedules, ResultFlags, "list all schedules", ""),
    "generate": ScheduleCommand(
        write_schedule, GenerateFlags, "make a schedule", f"--schedule zb-h1 {_SIZE} --output zb-h1.json"
    ),
    "simulate": ScheduleCommand(
        show_simulation,
        SimulateFlags,
        "simulate a schedule: idle time, times, memory and messages",
        f"--schedule zb-h1 {_SIZE} --time-comm 0.1",
    ),
    "compare": ScheduleCommand(
        compare,
        CompareFlags,
        "simulate several schedules and compare them in a table",
        "--schedule 1f1b --schedule zb-h1 --pipeline-size 8 --num-microbatches 24 --time-f 18.5 --time-b 18.1 "
        "--time-w 9.3",
    ),
    "draw": ScheduleCommand(draw, DrawFlags, "draw a schedule", f"--schedule zb-h2 {_SIZE} --output zb-h2.svg"),
    "validate": ScheduleCommand(
        prove,
        ValidateFlags,
        "prove that a schedule is complete, ordered and free of deadlock",
        "--input zb-h1.json",
    ),
    "memory-curve": ScheduleCommand(
        memory_curve,
        CurveFlags,
        "print the bubble rate under several memory limits",
        f"--schedule auto {_SIZE} --from 0.5 --to 2",
    ),
}
