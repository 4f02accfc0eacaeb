"""megatron-core's own order is run beside a planned order of the same layout, and the faster order goes on."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.order_trial import TrialResult, own_order
from megatron.zero_bubble.schedule import StageCosts
from megatron.zero_bubble.schedule.recomputation import Recompute


def plan(chunks: int = 1, kind: str = "linear", **changes) -> RunSchedules:
    return RunSchedules.named("auto", 2, chunks, kind).requesting(costs=StageCosts.uniform(2 * chunks), **changes)


@pytest.mark.parametrize(
    ("given", "name"),
    [(plan(), "1f1b"), (plan(2, "interleaved"), "interleaved-1f1b"), (plan(offloads=True, memory_limit=9.0), "1f1b")],
)
def test_the_own_order_is_the_one_of_megatron_core_for_the_placement(given: RunSchedules, name: str) -> None:
    own = own_order(given, 4)
    assert own is not None
    assert (own.schedule(4).name, own.placement) == (name, given.placement)
    assert not own.offloads


@pytest.mark.parametrize(
    "given",
    [
        plan(2, "v"),
        plan(2, "interleaved", pairs=True),
        plan(memory_limit=1.5),
        plan(vocabulary_parallel=True),
    ],
)
def test_there_is_none_for_other_layouts_or_in_less_memory(given: RunSchedules) -> None:
    assert own_order(given, 4) is None


def test_interleaved_1f1b_needs_whole_groups() -> None:
    assert own_order(plan(2, "interleaved", group_size=2), 3) is None


@pytest.mark.parametrize(
    ("recompute", "recomputes"), [(Recompute.FULL, True), (Recompute.PLANNED, False), (Recompute.NONE, False)]
)
def test_it_recomputes_as_megatron_core_does(recompute: Recompute, recomputes: bool) -> None:
    own = own_order(plan(recomputes=(recompute,)), 4)
    assert own is not None
    assert own.schedule(4).recomputes is recomputes


@pytest.mark.parametrize(
    ("own", "planned", "goes_on"), [(100.0, 99.0, True), (100.0, 99.8, False), (98.0, 99.0, False)]
)
def test_the_planned_order_goes_on_only_if_it_is_clearly_faster(own: float, planned: float, goes_on: bool) -> None:
    assert TrialResult("1f1b", own, planned).keeps_planned is goes_on


def test_a_result_says_what_was_measured_and_what_goes_on() -> None:
    assert str(TrialResult("1f1b", 98.0, 99.0)) == "1f1b 98.0 ms, the planned order 99.0 ms: continuing with 1f1b"
    assert (
        str(TrialResult("1f1b", 100.0, 90.0))
        == "1f1b 100.0 ms, the planned order 90.0 ms: continuing with the planned order"
    )
