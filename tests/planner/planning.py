"""Shared by the tests of the planners: the published cases, and random problems."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from megatron.zero_bubble.schedule import Placement, Schedule, StageCosts, Timeline, lower, simulate, validate

LITTLE = 20_000
"""Effort of the search in tests of properties that every plan has, fast or slow."""
ROWS = json.loads((Path(__file__).parent / "zero_bubble_paper.json").read_text())["bubble_rates"]


def row_id(row: dict) -> str:
    return f"{row['model']}-m{row['num_microbatches']}"


def row_costs(row: dict, num_chunks: int = 1) -> StageCosts:
    """The published times of a row, a rank's work and memory in equal parts for its chunks."""
    times = [row["time_ms"][kind] / num_chunks for kind in "FBW"]
    memory = [change / num_chunks for change in (1, -0.5, -0.5)]
    return StageCosts.uniform(num_chunks * row["num_stages"], *times, row["time_ms"]["comm"], *memory)


@st.composite
def random_costs(draw: st.DrawFn, num_stages: int) -> StageCosts:
    """Small whole numbers, so that the sums are exact; W releases what F took and B left."""

    def each(low: int, high: int, count: int = num_stages) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    memory_f = each(1, 4)
    memory_b = [-draw(st.integers(0, whole)) for whole in memory_f]
    memory_w = [-whole - b for whole, b in zip(memory_f, memory_b, strict=True)]
    return StageCosts(
        each(1, 6),
        each(1, 6),
        each(1, 6),
        each(0, 3, num_stages - 1),
        tuple(memory_f),
        tuple(memory_b),
        tuple(memory_w),
    )


@st.composite
def wild_costs(draw: st.DrawFn, num_stages: int) -> StageCosts:
    """Draws costs with times a thousand times as long as others, stages that hold nothing, and B's that add memory."""
    times = st.one_of(st.integers(1, 6), st.sampled_from([1000, 6000]))

    def each(values: st.SearchStrategy[int], count: int = num_stages) -> list[int]:
        return draw(
            st.one_of(st.lists(values, min_size=count, max_size=count), values.map(lambda value: [value] * count))
        )

    memory_f = each(st.integers(0, 4))
    memory_b = [draw(st.integers(-whole, 2)) for whole in memory_f]
    memory_w = [-whole - b for whole, b in zip(memory_f, memory_b, strict=True)]
    comm = each(st.one_of(st.integers(0, 6), st.just(1000)), num_stages - 1)
    return StageCosts(each(times), each(times), each(times), comm, memory_f, memory_b, memory_w)


def checked(schedule: Schedule, costs: StageCosts) -> Timeline:
    """The timeline of a schedule that is valid, lowered too."""
    validate(schedule)
    validate(lower(schedule))
    return simulate(schedule, costs)


def uneven(placement: Placement) -> StageCosts:
    """Every stage costs something else."""
    n = placement.num_stages
    times = [tuple(1.0 + (s * k % 5) / 4 for s in range(n)) for k in (1, 2, 3)]
    memory = tuple(100.0 + 10.0 * (s * 3 % 4) for s in range(n))
    return StageCosts(
        *times, (0.125,) * (n - 1), memory, tuple(-m / 4 for m in memory), tuple(-m * 3 / 4 for m in memory)
    )
