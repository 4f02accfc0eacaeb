"""Bring docs/schedules.md up to date: the pictures, and the tables between its "generated" marks.

    python -m benchmarks.document_schedules

Draws every schedule of the registry at 4 ranks and 8 microbatches into docs/schedules/, and compares all of them at
the published times of the paper's models. Run it after any change to a schedule.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from megatron.zero_bubble.cli.tables import table
from megatron.zero_bubble.job.files import write_file
from megatron.zero_bubble.schedule import (
    ScheduleError,
    StageCosts,
    generate,
    lower,
    names,
    placement_for,
    simulate,
    validate,
)
from megatron.zero_bubble.schedule.draw import to_svg
from megatron.zero_bubble.schedule.generators import ENTRIES
from megatron.zero_bubble.schedule.kinds import SENDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schedules.md"
RANKS, MICROBATCHES = 4, 8
TIMES = {"F": 10.0, "B": 9.0, "W": 7.0, "comm": 0.3}
"""What the pictures are drawn for: unequal, as real ones are, and communication that can be seen."""

NOT_COMPARED = ("optimal",)
"""Too slow at the sizes of the paper's models."""

# Qi et al. 2024 (openreview tuzTN0eIO5): model, ranks, microbatches, milliseconds of F, B, W and communication.
PUBLISHED = (
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601),
    ("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527),
    ("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377),
    ("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408),
)


def costs_for(name: str, num_ranks: int, f: float, b: float, w: float, comm: float) -> StageCosts:
    """Costs of whole ranks, in equal parts for the chunks; memory in M_B, half of which B releases."""
    placement = placement_for(name, num_ranks)
    v = placement.num_chunks
    return StageCosts.uniform(placement.num_stages, f / v, b / v, w / v, comm, 1 / v, -0.5 / v, -0.5 / v)


def pictures(folder: Path) -> str:
    """Draw all schedules; returns the Markdown that shows them."""
    folder.mkdir(exist_ok=True)
    parts = []
    for name, entry in ENTRIES.items():
        costs = costs_for(name, RANKS, *TIMES.values())
        schedule = generate(name, RANKS, MICROBATCHES, costs=costs)
        validate(lower(schedule))
        timeline = simulate(schedule, costs)
        write_file(folder / f"{name}.svg", to_svg(timeline, width=1000))
        parts.append(
            f"### {name}\n\n{entry.summary[0].upper()}{entry.summary[1:]}.\n\n![{name}](schedules/{name}.svg)\n"
        )
    return "\n".join(parts)


def comparison() -> str:
    """Bubble rate, peak memory and messages of every schedule, for every published model."""
    heads = ["schedule"]
    rows = [[name] for name in names() if name not in NOT_COMPARED]
    for model, num_ranks, num_microbatches, *times in PUBLISHED:
        heads += [f"{model}: bubble", "memory", "messages"]
        for row in rows:
            row += _figures(row[0], num_ranks, num_microbatches, times)
    return table(heads, rows, markdown=True)


def _figures(name: str, num_ranks: int, num_microbatches: int, times: list[float]) -> tuple[str, str, str]:
    """Bubble rate; peak memory in p M_B; messages a rank and microbatch, as a multiple of 1F1B's."""
    costs = costs_for(name, num_ranks, *times)
    try:
        schedule = generate(name, num_ranks, num_microbatches, costs=costs)
    except ScheduleError:
        return "-", "-", "-"
    timeline = simulate(schedule, costs)
    messages = sum(op.kind in SENDS for ops in lower(schedule).ops for op in ops)
    plain = 2 * (num_ranks - 1) * num_microbatches
    return (
        f"{100 * timeline.bubble_rate:.2f}%",
        f"{max(timeline.peak_memory) / num_ranks:.2f}",
        f"{messages / plain:.2f}",
    )


def fill(page: str, mark: str, contents: str) -> str:
    """The page with new contents between the marks `<!-- generated: mark -->` and `<!-- end -->`."""
    begin = f"<!-- generated: {mark} -->"
    pattern = re.compile(re.escape(begin) + r"\n.*?<!-- end -->", re.DOTALL)
    filled, count = pattern.subn(lambda _: f"{begin}\n{contents}<!-- end -->", page)
    if count != 1:
        raise ValueError(f"the page needs one mark {begin!r}, found {count}")
    return filled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    page = fill(page, "comparison", comparison())
    page = fill(page, "pictures", pictures(PAGE.parent / "schedules"))
    write_file(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
