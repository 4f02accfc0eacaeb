"""Bring docs/schedules.md up to date: the pictures, and the table between the page's "generated" marks.

    python -m benchmarks.document_schedules

The command draws every schedule of the registry with 4 ranks and 8 microbatches into docs/schedules/. In the
table, all schedules are simulated with the times that the zero-bubble paper published for its models. Run this command
after any change to a schedule.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published import PUBLISHED, PublishedModel, costs_of
from megatron.zero_bubble.cli.invocation import command
from megatron.zero_bubble.cli.shared_flags import CommandFlags
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Timeline, lower, simulate, validate
from megatron.zero_bubble.schedule.draw import to_svg
from megatron.zero_bubble.session.files import write_file

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schedules.md"
RANKS, MICROBATCHES = 4, 8
TIMES = (10.0, 9.0, 7.0, 0.3)
"""Milliseconds of F, B, W and a message in the pictures; the times differ, so that a reader can tell the operations
apart."""

USES = {
    "gpipe": "comparison",
    "1f1b": "comparison",
    "interleaved-1f1b": "comparison",
    "interleaved-pairs": "experts, comparison",
    "dualpipe-v": "experts, comparison",
    "zb-h1": "one chunk a rank, an order that depends on no costs",
    "zb-h2": "twice the memory, an order that depends on no costs",
    "zb-1p": "one chunk a rank",
    "zb-2p": "twice the memory",
    "auto": "several chunks a rank, uneven stages, any memory limit",
    "optimal": "proofs for small problems",
    "zb-v": "two chunks a rank",
    "v-half": "little memory",
    "v-min": "least memory",
    "interleaved-zb": "several chunks a rank, an order that depends on no costs",
}
"""Name of a schedule -> when to use the schedule."""

EXCHANGED = 0.3
"""Fraction of F and B in which experts exchange tokens, in the pictures of schedules with forward-backward pairs."""


def pictures(folder: Path) -> str:
    """Draw every schedule of the registry as an SVG in `folder`, and return Markdown that shows all SVGs."""
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
        parts.append(f"### {name}\n\n![{name}](schedules/{name}.svg)\n")
    return "\n".join(parts)


def comparison() -> str:
    """Return a Markdown table with a row for every schedule: method, simulated bubble and memory, and use.

    A range such as 1%-3% covers all published models. The first bubble is a fraction of the makespan. The second
    bubble, a fraction of the longest span of a rank, applies if there is no barrier between iterations. The memory is
    the peak memory of the rank with the largest peak, in p M_B.
    """
    heads = ("schedule", "placement", "method", "bubble", "interlocked", "memory", "use")
    rows = (heads, ("---",) * len(heads), *(row(name) for name in ENTRIES))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def row(name: str) -> tuple[str, ...]:
    """Return the cells of a schedule's row."""
    entry = ENTRIES[name]
    placement = "any" if entry.takes_placement else "V" if entry.placement == "v" else entry.placement
    figures = ("", "", "") if entry.is_slow else _ranges(name)
    return f"`{name}`", placement, entry.summary, *figures, USES[name]


def _ranges(name: str) -> tuple[str, str, str]:
    """Return, as text, the ranges of the two bubble rates and of the memory over the published models."""
    timelines = [_timeline(name, model) for model in PUBLISHED.values()]
    alone = [100 * (1 - max(each.work) / each.makespan) for each in timelines]
    interlocked = [100 * each.bubble_rate for each in timelines]
    memory = [
        max(each.peak_memory) / model.num_ranks for each, model in zip(timelines, PUBLISHED.values(), strict=True)
    ]
    return _range(alone, 1, "%"), _range(interlocked, 1, "%"), _range(memory, 2, "")


def _range(values: Sequence[float], digits: int, unit: str) -> str:
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{least}{unit}" if least == most else f"{least}-{most}{unit}"


def _timeline(name: str, model: PublishedModel) -> Timeline:
    """Simulate a schedule with the costs of a model.

    `auto` plans two interleaved chunks a rank, in the memory of megatron-core's interleaved schedule.
    """
    costs = costs_of(name, model.num_ranks, model.times)
    options: dict[str, Any] = {}
    if name == "auto":
        like = "interleaved-1f1b"
        costs = costs_of(like, model.num_ranks, model.times)
        peak = max(simulate(generate(like, model.num_ranks, model.num_microbatches), costs).peak_memory)
        options = {"num_chunks": 2, "memory_limit": peak}
    return simulate(generate(name, model.num_ranks, model.num_microbatches, costs=costs, **options), costs)


def fill(page: str, mark: str, contents: str) -> str:
    """Return `page` with `contents` between the marks `<!-- generated: mark -->` and `<!-- end -->`.

    Raises:
        ValueError: the page does not have the mark exactly once.
    """
    begin = f"<!-- generated: {mark} -->"
    pattern = re.compile(re.escape(begin) + r"\n.*?<!-- end -->", re.DOTALL)
    filled, count = pattern.subn(lambda _: f"{begin}\n{contents}<!-- end -->", page)
    if count != 1:
        raise ValueError(f"the page needs one mark {begin!r}, found {count}")
    return filled


@command("benchmarks.document_schedules", CommandFlags, __doc__)
def main(_flags: CommandFlags) -> None:
    page = PAGE.read_text(encoding="utf-8")
    page = fill(page, "comparison", comparison())
    page = fill(page, "pictures", pictures(PAGE.parent / "schedules"))
    write_file(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
