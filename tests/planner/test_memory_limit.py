"""What a memory limit may be, and what it is in the unit of costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.memory_limit import MemoryLimit, bytes_with_unit, interleaved_peaks, one_f_one_b_peaks
from megatron.zero_bubble.schedule import Placement, StageCosts, simulate
from megatron.zero_bubble.schedule.recomputation import Recompute
from tests.planner.planning import uneven

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("1", MemoryLimit(multiple=1.0)),
        ("1.5", MemoryLimit(multiple=1.5)),
        ("1.5x", MemoryLimit(multiple=1.5)),
        (" 2X ", MemoryLimit(multiple=2.0)),
        ("40GiB", MemoryLimit(num_bytes=40 * GIB)),
        ("0.5 gib", MemoryLimit(num_bytes=GIB // 2)),
        ("300MiB", MemoryLimit(num_bytes=300 * 2**20)),
        ("300MB", MemoryLimit(num_bytes=300 * 10**6)),
        ("2GB", MemoryLimit(num_bytes=2 * 10**9)),
        ("7KiB", MemoryLimit(num_bytes=7 * 1024)),
        ("7kb", MemoryLimit(num_bytes=7000)),
        ("123456B", MemoryLimit(num_bytes=123456)),
        ("auto", MemoryLimit()),
        ("AUTO", MemoryLimit()),
    ],
)
def test_a_limit_is_a_multiple_or_bytes_or_auto(text, limit):
    assert MemoryLimit.parse(text) == limit


@pytest.mark.parametrize(
    "text", ["", "much", "0", "-1", "0GiB", "-2GiB", "nan", "inf", "infGiB", "GiB", "4TiBs", "1.5y", "1e308", "1e30GiB"]
)
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        MemoryLimit.parse(text)
    assert str(error.value) == (
        f"{text!r} is not a memory limit: give a multiple of 1F1B's peak (1.5), bytes (40GiB) or auto"
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(1.5, "2B"), (102399, "102399B"), (102401, "101KiB"), (1095747840, "1045MiB")]
)
def test_a_number_of_bytes_is_printed_as_a_limit_that_is_large_enough(num_bytes, text):
    limit = MemoryLimit.parse(text).num_bytes
    assert bytes_with_unit(num_bytes) == text
    assert limit is not None
    assert num_bytes <= limit < 1.02 * num_bytes + 1


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_the_peak_of_1f1b_is_that_of_simulate(p, m):
    placement = Placement("linear", p)
    costs = uneven(placement)
    simulated = simulate(generate("1f1b", p, m), costs).peak_memory
    assert one_f_one_b_peaks(placement, costs, m) == pytest.approx(simulated)


@pytest.mark.parametrize("placement", [Placement("linear", 2), Placement("interleaved", 2, 2)], ids=str)
def test_the_peak_of_1f1b_counts_what_complete_microbatches_leave(placement):
    """Experts keep counts of tokens until the end of the step."""
    stages, m = placement.num_stages, 12
    costs = StageCosts.uniform(stages, memory_f=100.0, memory_b=-60.0, memory_w=-39.0)
    name = "1f1b" if placement.num_chunks == 1 else "interleaved-1f1b"
    peaks = (one_f_one_b_peaks if placement.num_chunks == 1 else interleaved_peaks)(placement, costs, m)
    own = simulate(generate(name, 2, m, num_chunks=placement.num_chunks), costs).peak_memory
    assert peaks == pytest.approx(own)
    planned = generate("auto", 2, m, num_chunks=placement.num_chunks, placement_kind=placement.kind, costs=costs)
    assert (
        simulate(planned, costs).makespan
        <= simulate(generate(name, 2, m, num_chunks=placement.num_chunks), costs).makespan
    )


def test_the_peak_of_1f1b_counts_all_chunks_of_a_rank():
    """What 1F1B would take with the same layers on every rank, as one stage each."""
    placement = Placement("v", 2, 2)
    memory = (1.0, 10.0, 100.0, 1000.0)
    costs = replace(uneven(placement), memory_f=memory, memory_b=(0,) * 4, memory_w=tuple(-each for each in memory))
    assert one_f_one_b_peaks(placement, costs, 8) == (2 * 1001.0, 1 * 110.0)


def test_the_peak_of_1f1b_includes_what_an_operation_of_that_rank_needs_inside():
    costs = StageCosts.uniform(2, memory_f=100.0, memory_b=-50.0, memory_w=-50.0)
    limit, placement = MemoryLimit(multiple=1.0), Placement("linear", 2)
    assert max(limit.of_ranks(placement, costs, 8, None, (30.0, 0.0))) == 230.0
    assert max(limit.of_ranks(placement, costs, 8, None, (0.0, 130.0))) == 230.0, "the last rank holds one microbatch"


def test_a_limit_in_bytes_of_measured_costs():
    placement = Placement("linear", 2)
    costs = StageCosts.uniform(2, memory_f=100.0, memory_b=-50.0, memory_w=-50.0)
    assert max(MemoryLimit(multiple=1.5).of_ranks(placement, costs, 8, None)) == 300.0
    assert max(MemoryLimit(multiple=1.5).of_ranks(placement, costs, 1, None)) == 150.0
    assert max(MemoryLimit(num_bytes=777).of_ranks(placement, costs, 8, None)) == 777
    assert max(MemoryLimit().of_ranks(placement, costs, 8, 555)) == 555


def test_a_limit_before_anything_is_measured():
    """Until costs are measured a limit is in M_B, of which 1F1B needs min(p, m)."""
    ranks = Placement("linear", 4)
    assert MemoryLimit(multiple=1.5).in_unit_costs(ranks, 8) == 6.0
    assert MemoryLimit(multiple=1.5).in_unit_costs(ranks, 2) == 3.0
    assert MemoryLimit(num_bytes=777).in_unit_costs(ranks, 8) is None
    assert MemoryLimit().in_unit_costs(ranks, 8) is None


@pytest.mark.parametrize(
    ("p", "m", "v", "group_size"),
    [(1, 3, 2, None), (2, 2, 2, None), (4, 4, 2, None), (4, 10, 4, 6), (4, 40, 3, None), (2, 24, 2, 4), (4, 8, 2, 8)],
)
def test_the_peak_of_interleaved_1f1b_is_that_of_simulate(p, m, v, group_size):
    placement = Placement("interleaved", p, v)
    costs = uneven(placement)
    peaks = simulate(generate("interleaved-1f1b", p, m, num_chunks=v, group_size=group_size), costs).peak_memory
    limit = MemoryLimit(multiple=1.5, is_interleaved=True, group_size=group_size)
    assert interleaved_peaks(placement, costs, m, group_size=group_size) == peaks
    assert max(limit.of_ranks(placement, costs, m, None)) == 1.5 * max(peaks)
    assert max(limit.of_ranks(placement, costs, m, None, (7.0,) * p)) == 1.5 * (max(peaks) + 7.0)


def test_the_peak_of_interleaved_1f1b_in_whole_ranks():
    """(p + (p-1)/v) M_B; with full recomputation each but one holds a sixteenth."""
    limit, placement = MemoryLimit(multiple=1.0, is_interleaved=True), Placement("interleaved", 4, 2)
    assert limit.in_unit_costs(placement, 16) == limit.in_unit_costs(placement, 13) == 5.5
    assert limit.in_unit_costs(placement, 3) == 4
    assert limit.in_unit_costs(placement, 16, Recompute.FULL) == 5 / 16 + 1 / 2


def test_less_than_one_byte_is_refused():
    with pytest.raises(ValueError, match="'1e-12GiB' is not a memory limit: give a whole number of bytes"):
        MemoryLimit.parse("1e-12GiB")
