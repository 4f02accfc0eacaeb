"""Bring docs/schedules.md up to date: the pictures, and the tables between its "generated" marks.

    python -m benchmarks.document_schedules

Draws every schedule of the registry at 4 ranks and 8 microbatches into docs/schedules/, and compares all of them at
the published times of the paper's models. Run it after any change to a schedule.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.published import PUBLISHED, PublishedModel, costs_of
from megatron.zero_bubble.cli.invocation import read_flags, run_command
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.shared_flags import CommandFlags
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import ScheduleError, lower, simulate, validate
from megatron.zero_bubble.schedule.draw import to_svg
from megatron.zero_bubble.schedule.kinds import SENDS
from megatron.zero_bubble.session.files import write_file

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schedules.md"
_PROG = "benchmarks.document_schedules"
RANKS, MICROBATCHES = 4, 8
TIMES = (10.0, 9.0, 7.0, 0.3)
"""Milliseconds of F, B, W and a message in the pictures; unequal, as in real trainings, so that each can be seen."""

EXCHANGED = 0.3
"""The part of F and B, in the pictures of schedules with pairs, in which tokens are exchanged between experts."""


def pictures(folder: Path) -> str:
    """Draw every schedule of the registry as an SVG in `folder` and return the Markdown that shows them."""
    folder.mkdir(exist_ok=True)
    parts = []
    for name, entry in ENTRIES.items():
        costs = costs_of(name, RANKS, TIMES)
        if entry.has_pairs:
            exchanged = (
                tuple(time * EXCHANGED for time in costs.time_f),
                tuple(time * EXCHANGED for time in costs.time_b),
            )
            costs = replace(costs, all_to_all_f=exchanged[0], all_to_all_b=exchanged[1])
        schedule = generate(name, RANKS, MICROBATCHES, costs=costs)
        validate(lower(schedule))
        timeline = simulate(schedule, costs)
        write_file(folder / f"{name}.svg", to_svg(timeline, width=1000))
        parts.append(
            f"### {name}\n\n{entry.summary[0].upper()}{entry.summary[1:]}.\n\n![{name}](schedules/{name}.svg)\n"
        )
    return "\n".join(parts)


def comparison() -> str:
    """Return a Markdown table: bubble rate, peak memory and messages of every schedule for every published model."""
    heads = ["schedule"]
    rows = [[name] for name, entry in ENTRIES.items() if not entry.is_slow]
    for title, model in PUBLISHED.items():
        heads += [f"{title}: bubble", "memory", "messages"]
        for row in rows:
            row += _figures(row[0], model)
    return table(heads, rows, markdown=True)


def _figures(name: str, model: PublishedModel) -> tuple[str, str, str]:
    """Return the bubble rate, the peak memory in p M_B and the number of messages as a multiple of 1F1B's, as text."""
    costs = costs_of(name, model.num_ranks, model.times)
    try:
        schedule = generate(name, model.num_ranks, model.num_microbatches, costs=costs)
    except ScheduleError:
        return "-", "-", "-"
    timeline = simulate(schedule, costs)
    messages = sum(op.kind in SENDS for ops in lower(schedule).ops for op in ops)
    plain = 2 * (model.num_ranks - 1) * model.num_microbatches
    return (
        f"{100 * timeline.bubble_rate:.2f}%",
        f"{max(timeline.peak_memory) / model.num_ranks:.2f}",
        f"{messages / plain:.2f}",
    )


def fill(page: str, mark: str, contents: str) -> str:
    """Return `page` with `contents` between the marks `<!-- generated: mark -->` and `<!-- end -->`.

    Raises:
        ValueError: the page does not have this mark exactly once.
    """
    begin = f"<!-- generated: {mark} -->"
    pattern = re.compile(re.escape(begin) + r"\n.*?<!-- end -->", re.DOTALL)
    filled, count = pattern.subn(lambda _: f"{begin}\n{contents}<!-- end -->", page)
    if count != 1:
        raise ValueError(f"the page needs one mark {begin!r}, found {count}")
    return filled


def main(argv: list[str] | None = None) -> int:
    return run_command(_PROG, lambda: _document(sys.argv[1:] if argv is None else argv))


def _document(argv: list[str]) -> None:
    read_flags(CommandFlags, argv, _PROG, __doc__ or "")
    page = PAGE.read_text(encoding="utf-8")
    page = fill(page, "comparison", comparison())
    page = fill(page, "pictures", pictures(PAGE.parent / "schedules"))
    write_file(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
