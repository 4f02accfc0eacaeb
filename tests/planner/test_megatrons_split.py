"""Megatron's split under megatron-core's own schedule takes the memory of megatron-core's checkpoints."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner.layout_plan import Plan
from megatron.zero_bubble.planner.megatrons_split import as_megatron_runs, capacity_of_multiple, megatrons_layout
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute

INPUT, RESTORED, STATE = 1.0, 15.0, 10.0


def on_split(recompute: Recompute, layers_of_block: int = 1, fused_backward: float = 0) -> Plan:
    layer = UnitCosts(
        time_f=1,
        time_b=1,
        time_w=1,
        memory_f=INPUT + RESTORED,
        memory_b=-8,
        memory_w=-8,
        time_r=1,
        memory_r=RESTORED,
        num_blocks=1 / layers_of_block,
        state=STATE,
    )
    nothing = UnitCosts(time_f=0, time_b=0, time_w=0)
    model = ModelCosts(nothing, (layer,) * 8, nothing, fused_backward=fused_backward)
    request = PlanRequest("auto", 4, (Placement("linear", 2),), model)
    return as_megatron_runs(request, megatrons_layout(8, 2, recompute=recompute))


@pytest.mark.parametrize("layers_of_block", [1, 2, 4])
def test_under_full_recomputation_the_first_rank_has_inputs_and_one_restored_block(layers_of_block: int) -> None:
    inputs = 2 * 4 * INPUT  # of two microbatches in four layers
    plan = on_split(Recompute.FULL, layers_of_block)
    assert plan.memory == pytest.approx(4 * STATE + inputs + layers_of_block * RESTORED)


def test_without_recomputation_it_has_two_microbatches_in_full() -> None:
    assert on_split(Recompute.NONE).memory == pytest.approx(4 * STATE + 2 * 4 * (INPUT + RESTORED))


def test_the_limit_of_interleaved_1f1b_exists_for_any_number_of_microbatches() -> None:
    """megatron-core's interleaved schedule needs whole groups of microbatches."""
    unit = UnitCosts(1, 1, 1, memory_f=1, memory_b=-0.5, memory_w=-0.5)
    layout = megatrons_layout(8, 4, 2)
    few, whole = (PlanRequest("auto", m, (layout.placement,), ModelCosts(unit, (unit,) * 8, unit)) for m in (6, 8))
    limit = capacity_of_multiple(few, layout, 1.0, is_interleaved=True)
    assert limit == capacity_of_multiple(whole, layout, 1.0, is_interleaved=True)


def test_its_backwards_compute_both_gradients_at_once() -> None:
    m, p, layers = 4, 2, 4
    assert on_split(Recompute.NONE).time == pytest.approx((m + p - 1) * layers * 3)
    assert on_split(Recompute.NONE, fused_backward=0.9).time == pytest.approx((m + p - 1) * layers * (1 + 0.9 * 2))
