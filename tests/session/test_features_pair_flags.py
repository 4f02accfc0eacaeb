"""`--overlap-moe-expert-parallel-comm` refuses what it does not support in one line, before ranks meet."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.plans import choose_plan

GIVEN = {
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 8,
    "num_layers": 4,
    "zero_bubble_schedule": "auto",
    "overlap_moe_expert_parallel_comm": True,
}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"mtp_num_layers": 1}, "would add the gradients of a weight that embedding and output layer share"),
        ({"zero_bubble_replan_threshold": 0.1}, "whose times --zero-bubble-replan-threshold 0.1 cannot compare"),
    ],
)
def test_what_pairs_do_not_work_with_is_refused(flags, words):
    with pytest.raises(ValueError, match=f"--overlap-moe-expert-parallel-comm .*{words}"):
        choose_plan(JobFlags(**{**GIVEN, **flags}))
    assert choose_plan(JobFlags(**{**GIVEN, **flags, "overlap_moe_expert_parallel_comm": False})) is not None


def test_prediction_layers_with_a_weight_of_their_own_run_in_pairs():
    plan = choose_plan(JobFlags(**GIVEN, mtp_num_layers=1, untie_embeddings_and_output_weights=True))
    assert plan is not None
    assert plan.request.pairs
