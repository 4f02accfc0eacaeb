"""Settings with which no pairs run; their numbers are in `end_to_end/test_experts_overlapped.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.zero_bubble.mcore.paired_stage import refuse_unpaired

FINE = {
    "expert_model_parallel_size": 2,
    "recompute_granularity": None,
    "moe_shared_expert_overlap": False,
    "mtp_num_layers": None,
    "moe_token_dispatcher_type": "alltoall",
}


class Planned:
    def build_schedule_plan(self) -> None: ...


def test_a_model_with_schedule_plans_is_taken():
    refuse_unpaired(SimpleNamespace(**FINE), Planned)
    refuse_unpaired(SimpleNamespace(**FINE, layers=1))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"recompute_granularity": "full"}, "--recompute-granularity full"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"mtp_num_layers": 2}, "--mtp-num-layers 2"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
    ],
)
def test_a_setting_that_plans_do_not_support_is_refused(changed, words):
    with pytest.raises(ValueError, match=f"--overlap-moe-expert-parallel-comm does not work with {words}: change one"):
        refuse_unpaired(SimpleNamespace(**{**FINE, **changed}), Planned)


def test_a_model_without_plans_is_refused():
    with pytest.raises(ValueError, match="needs a model with build_schedule_plan, such as GPTModel, and not object"):
        refuse_unpaired(SimpleNamespace(**FINE), object)
