"""The table of what works with what agrees with the table of Megatron's settings, and its tests exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from megatron.zero_bubble.mcore.refused_settings import REFUSALS, Feature
from tests.launch import ROOT
from tools.setting_groups import Effect, effects, is_unconditional

SETTINGS = {
    "fp32, bf16": "bf16",
    "fp16": "fp16",
    "fp8, fp4": "fp8",
    "tensor, sequence, context, data parallelism; experts": (
        "tensor_model_parallel_size sequence_parallel context_parallel_size overlap_grad_reduce num_experts"
    ),
    "`--use-distributed-optimizer` (ZeRO-1)": "use_distributed_optimizer",
    "`--use-torch-fsdp2` (ZeRO-2, 3)": "use_torch_fsdp2",
    "Megatron-FSDP": "use_megatron_fsdp",
    "expert parallelism": "expert_model_parallel_size",
    "`--overlap-moe-expert-parallel-comm`": "overlap_moe_expert_parallel_comm",
    "multi-token prediction": "mtp_num_layers",
    "hybrid models (Mamba)": "hybrid_layer_pattern",
    "full, selective, planned recomputation": "recompute_granularity",
    "uneven stages": "pipeline_model_parallel_layout",
    "variable lengths, packed sequences": "variable_seq_lengths",
    "tied embeddings": "untie_embeddings_and_output_weights",
    "Transformer Engine 2.8 and later": "transformer_impl",
    "apex, fused accumulation": "gradient_accumulation_fusion",
    "CUDA graphs": "cuda_graph_impl",
    "Megatron's activation offloading": "fine_grained_activation_offloading",
    "ModelOpt": "modelopt_enabled",
}
"""The settings of Megatron that each row is about; the other rows are about flags of zero bubble."""
WITHOUT_SETTING = {
    *("chosen layouts", "V placements", "Adam, SGD", "`--zero-bubble-offload auto`", "vocabulary shards"),
    *("hierarchical SGD", "saving, resuming", "Slurm", "GPUs, NCCL", "`torch.compile`"),
}
STATUS = {Effect.RUN: "yes", Effect.HANDLED: "yes", Effect.READ: "read", Effect.REFUSED: "no"}
EXCEPTIONS = {"`--use-torch-fsdp2` (ZeRO-2, 3)", "Transformer Engine 2.8 and later", "apex, fused accumulation"}
"""Rows whose status is not that of the setting: the trainer runs FSDP2, and stand-ins replace packages."""


def table() -> dict[str, list[str]]:
    """Status, refusals and test of every row, by the feature."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in page.splitlines() if line.startswith("|")][2:]
    return {feature: cells for feature, *cells in rows}


def refused_with(setting: str) -> Iterator[str]:
    """The features that a setting is refused with, each with the values for which it is."""
    for refusal in REFUSALS:
        if setting in refusal.names.split() and not is_unconditional(refusal):
            features = " and ".join(shown(feature) for feature in refusal.features) or "every schedule"
            yield f"{features} ({refusal.when.words})" if refusal.when.words else features


def shown(feature: Feature) -> str:
    return f"`{feature.value}`" if feature.value.startswith("--") else feature.value


def test_every_row_is_checked() -> None:
    assert {*SETTINGS, *WITHOUT_SETTING} == {*table()}


@pytest.mark.parametrize("feature", SETTINGS)
def test_status_and_refusals_are_those_of_the_settings(feature: str) -> None:
    status, refused, _ = table()[feature]
    settings = SETTINGS[feature].split()
    assert refused == ", ".join(text for setting in settings for text in refused_with(setting))
    if feature not in EXCEPTIONS:
        words = {STATUS[dict(effects())[setting]] for setting in settings}
        assert {re.split("[,; ]", status)[0]} == words


def test_what_works_has_a_test_that_exists() -> None:
    rows = table()
    assert [feature for feature, (status, *_, test) in rows.items() if re.match(r"\[?yes", status) and not test] == []
    tests = [test.strip("`") for *_, test in rows.values() if test]
    assert len(tests) > 20
    assert [test for test in tests if not (ROOT / "tests" / test).is_file()] == []
