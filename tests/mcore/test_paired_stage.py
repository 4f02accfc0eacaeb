"""Settings with which no pairs run; their numbers are in `end_to_end/test_experts_overlapped.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megatron.zero_bubble.mcore.paired_stage import refuse_unpaired, refuse_unplanned
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError, RecordedCall

FINE = {
    "expert_model_parallel_size": 2,
    "recompute_granularity": None,
    "moe_shared_expert_overlap": False,
    "mtp_num_layers": None,
    "moe_token_dispatcher_type": "alltoall",
    "num_layers": 9,
    "moe_layer_freq": 2,
}


class Planned:
    def build_schedule_plan(self) -> None: ...


def test_a_model_with_schedule_plans_is_taken():
    refuse_unpaired(SimpleNamespace(**FINE), Planned)
    refuse_unpaired(SimpleNamespace(**FINE, layers=1))
    refuse_unpaired(SimpleNamespace(**{**FINE, "mtp_num_layers": 1}))
    refuse_unpaired(SimpleNamespace(**{**FINE, "recompute_granularity": "selective"}, recompute_modules=["core_attn"]))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"recompute_granularity": "full"}, "--recompute-granularity full"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"mtp_num_layers": 2}, "--mtp-num-layers 2"),
        ({"mtp_num_layers": 1, "num_layers": 8}, "--mtp-num-layers and .*--moe-layer-freq.*"),
        ({"mtp_num_layers": 1, "moe_layer_freq": [1, 0]}, "--mtp-num-layers and .*--moe-layer-freq.*"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
            "--recompute-modules moe",
        ),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"enable_mhc_connections": True}, "enable_mhc_connections of the model's configuration"),
        ({"fp4": "e2m1"}, "--fp4-format"),
        (
            {"experimental_attention_variant": "gated_delta_net"},
            "--experimental-attention-variant gated_delta_net",
        ),
    ],
)
def test_a_setting_that_plans_do_not_support_is_refused(changed, words, monkeypatch):
    """Plans of some versions compute in bf16 in place of fp4, and need `backward_dw` of every attention."""
    monkeypatch.delattr(TransformerLayerSchedulePlan, "get_low_precision_context", raising=False)
    monkeypatch.delattr(GatedDeltaNet, "backward_dw", raising=False)
    with pytest.raises(ValueError, match=f"--overlap-moe-expert-parallel-comm does not work with {words}: change one"):
        refuse_unpaired(SimpleNamespace(**{**FINE, **changed}), Planned)


def test_a_model_without_plans_is_refused():
    with pytest.raises(ValueError, match="needs a model with build_schedule_plan, such as GPTModel, and not object"):
        refuse_unpaired(SimpleNamespace(**FINE), object)


TOKENS = torch.zeros(1, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"padding_mask": TOKENS.bool()}, "a padding_mask"),
        ({"packed_seq_params": SimpleNamespace(tokens_per_sample=4)}, "several samples in one packed sequence"),
        ({"padding_mask": None, "packed_seq_params": SimpleNamespace(tokens_per_sample=8)}, None),
        ({"packed_seq_params": SimpleNamespace()}, None),
        ({}, None),
    ],
)
def test_a_forward_whose_router_gets_other_tokens_in_a_plan_is_refused(keywords, words):
    call = RecordedCall((TOKENS, TOKENS, None), keywords, None)
    if words is None:
        refuse_unplanned(call)
        return
    with pytest.raises(ForwardStepError, match=f"^--overlap-moe-expert-parallel-comm does not support {words} in the"):
        refuse_unplanned(call)


def test_packed_sequences_are_refused_beside_multi_token_prediction():
    call = RecordedCall((TOKENS, TOKENS, None), {"packed_seq_params": SimpleNamespace(tokens_per_sample=8)}, None)
    refuse_unplanned(call)
    with pytest.raises(ForwardStepError, match="does not support a packed sequence with --mtp-num-layers"):
        refuse_unplanned(call, predicts_further=True)
