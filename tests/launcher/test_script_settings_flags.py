"""The flags of a job are read from the arguments of a Megatron-LM script."""

from __future__ import annotations

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zero_bubble.launcher import script_settings
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.script_settings import flags_of, overlap_taken_over
from tests.launcher.script_flags import script_arguments


def test_the_batch_sizes_of_a_job_follow_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's arguments then have one microbatch on every replica as global batch size."""
    monkeypatch.setattr(script_settings, "sizes_of_steps", lambda text: (6, 8, 32))
    given = {"global_batch_size": 4, "data_parallel_size": 4, "step_batch_size_schedule": "0:6 1M:8 2M:32"}
    job = flags_of(script_arguments(**given), LaunchFlags())
    assert list(job.batch_sizes) == [8, 32]  # 6 is from a time with fewer replicas
    assert job.most_microbatches == 8


@pytest.mark.parametrize("ignored", [False, True])
def test_a_ramp_that_megatron_core_ignores_is_not_planned_for(ignored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_settings, "has_steps", lambda: ignored)
    job = flags_of(script_arguments(rampup_batch_size=["2", "2", "100"]), LaunchFlags())
    assert list(job.batch_sizes) == ([8] if ignored else [2, 4, 6, 8])


@pytest.mark.parametrize(
    "layout",
    [
        "Et|t|tt|L",
        [["embedding", "decoder"], ["decoder"], [LayerType.decoder, "Decoder "], [LayerType.loss]],
    ],
)
@pytest.mark.parametrize("is_parsed", [False, True])
def test_a_layout_may_be_text_or_lists(layout: str | list[list[str | LayerType]], is_parsed: bool) -> None:
    given = PipelineParallelLayerLayout(layout, 2) if is_parsed else layout
    job = flags_of(script_arguments(pipeline_model_parallel_layout=given), LaunchFlags())
    assert job.pipeline_model_parallel_layout == "Et|t|tt|L"


def test_megatron_lm_validates_the_overlap_of_experts_and_does_not_run_it() -> None:
    """With the flag, Megatron-LM allows any CUDA_DEVICE_MAX_CONNECTIONS beside tensor parallelism."""
    script = script_arguments(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    with overlap_taken_over(script):
        assert (script.overlap_moe_expert_parallel_comm, script.delay_wgrad_compute) == (True, False)
    assert not script.overlap_moe_expert_parallel_comm
    assert flags_of(script, LaunchFlags()).overlap_moe_expert_parallel_comm
