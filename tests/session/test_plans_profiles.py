"""A run is planned with a profile of the same model and layout, and refuses any other in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.schedule.formats import profile_from_json, profile_to_json
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.trainer.model import transformer_config
from tests.checked_flags import checked, checked_job
from tests.session.planned_flags import KEPT, PLANNED, profile_of, refusal


def test_a_profile_of_the_same_run_is_planned_with(tmp_path: Path):
    file = profile_of({}, tmp_path / "profile.json")
    assert checked({**PLANNED, "--zero-bubble-profile-input": file}).zero_bubble_profile_input == file


def test_a_profile_of_the_same_layers_by_other_flags_is_planned_with(tmp_path: Path):
    file = profile_of({"--pipeline-model-parallel-layout": "Ett|tt|tt|ttL"}, tmp_path / "profile.json")
    assert checked({**PLANNED, **KEPT, "--zero-bubble-profile-input": file}).zero_bubble_profile_input == file


@pytest.mark.parametrize("measured", ["--decoder-first-pipeline-num-layers", "--pipeline-model-parallel-layout"])
def test_a_profile_is_planned_with_in_the_uneven_stages_that_megatrons_flags_give(measured: str, tmp_path: Path):
    uneven = {"--num-layers": "9", "--decoder-first-pipeline-num-layers": "3"}
    same = {measured: "3" if measured in uneven else "Ettt|tt|tt|ttL", "--num-layers": "9"}
    file = profile_of({**KEPT, **same}, tmp_path / "profile.json")
    job = checked_job({**PLANNED, **KEPT, **uneven, "--zero-bubble-profile-input": file})
    assert job.planning.profile is not None


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"--pipeline-model-parallel-size": "2"}, "num_ranks 2, this run has 4"),
        ({"--num-virtual-stages-per-pipeline-rank": "2"}, "kind interleaved, this run has linear"),
        ({"--hidden-size": "128"}, "hidden_size 128, this run has 64"),
        ({"--num-layers": "4"}, "num_layers 4, this run has 8"),
        ({"--bf16": None}, "bf16 True, this run has False"),
        ({"--attention-backend": "flash"}, "attention_backend flash, this run has local"),
        ({"--micro-batch-size": "1"}, "micro_batch_size 1, this run has 2"),
        (
            {"--pipeline-model-parallel-layout": "Ettt|tt|tt|tL"},
            "pipeline_model_parallel_layout Ettt|tt|tt|tL, this run has None",
        ),
    ],
)
def test_a_profile_of_another_run_is_refused(changes, difference, tmp_path: Path):
    file = profile_of(changes, tmp_path / "profile.json")
    line = refusal({**KEPT, "--zero-bubble-profile-input": file})
    assert line == f"--zero-bubble-profile-input {file}: the profile was measured with {difference}"


@pytest.mark.parametrize("measured", [False, True])
def test_a_profile_with_shards_fits_only_a_run_with_shards(measured: bool, tmp_path: Path):
    """The profile of a job that chose the shards has no flag for them, and no profile of a Megatron-LM script has."""
    file = Path(profile_of(KEPT, tmp_path / "profile.json"))
    profile = profile_from_json(file.read_text())
    if measured:
        costs = profile.costs.with_shards(profile.placement, {"time_s": 1.0, "time_t": 0.5})
        file.write_text(profile_to_json(replace(profile, costs=costs)))
    shards: dict[str, str | None] = {"--zero-bubble-vocabulary-parallel": "on"}
    given: dict[str, str | None] = {**KEPT, "--zero-bubble-profile-input": str(file)}
    assert checked_job({**PLANNED, **given, **(shards if measured else {})}).planning.profile is not None
    theirs, ours, value = ("with", "none", "on") if measured else ("without", "them", "off")
    assert refusal({**given, **({} if measured else shards)}) == (
        f"--zero-bubble-profile-input {file}: the profile was measured {theirs} vocabulary shards, this run has "
        f"{ours}: give --zero-bubble-vocabulary-parallel {value}"
    )


EXPERTS = {"--num-experts": "4", "--moe-ffn-hidden-size": "48", "--disable-bias-linear": None}
LATENT = {"--multi-latent-attention": None, "--q-lora-rank": "16", "--kv-lora-rank": "16"}


@pytest.mark.parametrize(
    ("model", "changes", "difference"),
    [
        (EXPERTS, {"--moe-ffn-hidden-size": "96"}, "moe_ffn_hidden_size 96, this run has 48"),
        (EXPERTS, {"--moe-ffn-hidden-size": None}, "moe_ffn_hidden_size 256, this run has 48"),
        (EXPERTS, {"--moe-layer-freq": "[0]*2+[1]*6"}, "moe_layer_freq [0, 0, 1, 1, 1, 1, 1, 1], this run has 1"),
        (EXPERTS, {"--moe-router-topk": "1"}, "moe_router_topk 1, this run has 2"),
        (
            {**EXPERTS, "--moe-shared-expert-intermediate-size": "64"},
            {"--moe-shared-expert-intermediate-size": "32"},
            "moe_shared_expert_intermediate_size 32, this run has 64",
        ),
        (LATENT, {"--kv-lora-rank": "32"}, "kv_lora_rank 32, this run has 16"),
        (LATENT, {"--v-head-dim": "64"}, "v_head_dim 64, this run has 128"),
    ],
)
def test_a_profile_of_other_experts_or_latent_attention_is_refused(model, changes, difference, tmp_path: Path):
    measured = {name: value for name, value in {**model, **changes}.items() if value or name not in changes}
    file = profile_of(measured, tmp_path / "profile.json")
    line = refusal({**KEPT, **model, "--zero-bubble-profile-input": file})
    assert line == f"--zero-bubble-profile-input {file}: the profile was measured with {difference}"


def test_how_experts_are_balanced_does_not_change_what_they_cost(tmp_path: Path):
    file = profile_of({**EXPERTS, "--moe-aux-loss-coeff": "0.5"}, tmp_path / "profile.json")
    assert checked({**PLANNED, **EXPERTS, "--zero-bubble-profile-input": file}).zero_bubble_profile_input == file


def test_a_configuration_describes_the_model_as_the_flags_do():
    """A loop that is not Megatron-LM's has megatron-core's configuration alone."""
    flags = checked({**EXPERTS, **LATENT, "--swiglu": None})
    config = transformer_config(flags, 1, None)
    described = JobFlags.of(config).model
    sizes = ("num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "kv_lora_rank", "v_head_dim", "swiglu")
    assert {name: described[name] for name in sizes} == {name: JobFlags.of(flags).model[name] for name in sizes}


def test_megatron_lm_fills_in_how_ranks_share_experts():
    ours = checked({**PLANNED, "--num-experts": "4", "--disable-bias-linear": None})
    theirs = replace(ours, expert_tensor_parallel_size=1, moe_ffn_hidden_size=ours.ffn_hidden_size)
    theirs = replace(theirs, moe_router_load_balancing_type=["aux_loss"])
    assert JobFlags.of(theirs).model == JobFlags.of(ours).model


def test_megatron_lm_leaves_one_group_where_keys_are_not_grouped():
    """Megatron-LM's arguments say one group there and ours as many as heads; profiles of both describe one model."""
    ours = checked(PLANNED)
    theirs = replace(ours, num_query_groups=1)
    assert not ours.group_query_attention
    assert JobFlags.of(theirs).model == JobFlags.of(ours).model
    assert JobFlags.of(replace(theirs, group_query_attention=True)).model != JobFlags.of(ours).model


def test_a_profile_of_another_number_of_chunks_is_refused(tmp_path: Path):
    chunks = "--num-virtual-stages-per-pipeline-rank"
    file = profile_of({"--num-layers": "16", chunks: "4"}, tmp_path / "profile.json")
    line = refusal({**KEPT, "--num-layers": "16", chunks: "2", "--zero-bubble-profile-input": file})
    assert line.endswith("the profile was measured with num_chunks 4, this run has 2")


@pytest.mark.parametrize("text", ["", "{}", "not JSON"])
def test_a_file_that_is_no_profile_is_refused(text, tmp_path: Path):
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert refusal({"--zero-bubble-profile-input": str(file)}).startswith(f"--zero-bubble-profile-input {file}: ")
