"""A job that would gain from post-validation says so with its plan from measured costs."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import PlanRequest, schedule_of
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.schedule import Placement, StageCosts, iteration_time, with_post_validation
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.session.features import advice_on_post_validation
from megatron.zero_bubble.session.job_flags import JobFlags

LINEAR, V = Placement("linear", 4), Placement("v", 4, 2)


def prediction(name: str, placement: Placement) -> Prediction:
    costs = StageCosts.uniform(placement.num_stages, 3, 2, 2, 0.1)
    return Prediction(Profile(placement, costs, 0.0, {}), schedule_of(PlanRequest(name, 8, (placement,), costs)))


def advice(name: str, placement: Placement, *, untied: bool = True, **flags) -> str | None:
    given = {"pipeline_model_parallel_size": 4, "global_batch_size": 8, "num_layers": 8}
    job = JobFlags(**given, untie_embeddings_and_output_weights=untied, **flags)
    return advice_on_post_validation(job, prediction(name, placement))


def test_the_gain_is_that_of_the_schedule_with_its_step_validated_afterwards():
    planned = prediction("zb-2p", LINEAR)
    schedule, costs = planned.schedule, planned.profile.costs
    gain = 1 - iteration_time(with_post_validation(schedule, costs), costs) / iteration_time(schedule, costs)
    line = advice("zb-2p", LINEAR)
    assert line is not None
    assert line.endswith(f"an iteration would be {gain:.1%} shorter")
    assert "--zero-bubble-post-validation" in line


def test_a_v_gains_with_tied_embeddings_too():
    assert advice("zb-v", V, untied=False) is not None


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("zb-h1", {}),
        ("1f1b", {}),
        ("zb-2p", {"untied": False}),
        ("zb-2p", {"zero_bubble_post_validation": True}),
        ("zb-2p", {"log_num_zeros_in_grad": True}),
        ("zb-2p", {"timing_log_level": 2}),
        ("zb-2p", {"fp16": True}),
        ("zb-2p", {"hierarchical_sgd": "2:2"}),
    ],
)
def test_nothing_is_advised_where_nothing_is_gained_or_a_setting_refuses_it(name, flags):
    assert advice(name, LINEAR, **flags) is None
