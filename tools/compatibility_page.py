"""Prints docs/compatibility.md from the table of Megatron's settings and from the tests:

python -m tools.compatibility_page > docs/compatibility.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.zero_bubble.launcher.launch import SUPPORTED
from megatron.zero_bubble.mcore.compatibility.compatibility_table import effects
from megatron.zero_bubble.mcore.compatibility.refusals import REFUSALS
from megatron.zero_bubble.mcore.compatibility.setting_rows import Effect, Feature

_STATUS = {Effect.RUN: "yes", Effect.HANDLED: "yes", Effect.READ: "read", Effect.REFUSED: "no"}


@dataclass(frozen=True)
class FeatureRow:
    """A row of the page.

    Attributes:
        title: the feature, with the flags that users know it by.
        setting: the name of one of Megatron's settings, from which status and refusals follow.
        test: the test that compares its numbers, below `tests/`; empty if there is none.
        status: what stands in the place of the status of the setting.
        remark: what a user needs to know beside the status.
        versions: of megatron-core, if not all that are supported.
    """

    title: str
    setting: str = ""
    test: str = ""
    status: str = ""
    remark: str = ""
    versions: str = f"{SUPPORTED[0]} to {SUPPORTED[-1]}"


ROWS = (
    FeatureRow("fp32, bf16", "bf16", "end_to_end/test_numerics.py"),
    FeatureRow("fp16", "fp16", "end_to_end/test_post_validation.py"),
    FeatureRow("fp8, fp4", "fp8", "", "read", "flags arrive in the configuration"),
    FeatureRow("tensor, sequence parallelism", "tensor_model_parallel_size", "end_to_end/test_parallelism.py"),
    FeatureRow("context parallelism", "context_parallel_size", "end_to_end/test_parallelism.py"),
    FeatureRow("data parallelism, `--overlap-grad-reduce`", "overlap_grad_reduce", "end_to_end/test_parallelism.py"),
    FeatureRow("`--use-distributed-optimizer` (ZeRO-1)", "use_distributed_optimizer", "end_to_end/test_parallelism.py"),
    FeatureRow(
        "`--use-torch-fsdp2` (ZeRO-2, 3)",
        "use_torch_fsdp2",
        "end_to_end/test_fully_sharded.py",
        "`pretrain_gpt.py` only",
        "[what it does not work with](replicas.md#sharding)",
        "0.16",
    ),
    FeatureRow("Megatron-FSDP", "use_megatron_fsdp"),
    FeatureRow("experts", "num_experts", "end_to_end/test_parallelism.py"),
    FeatureRow("expert parallelism", "expert_model_parallel_size", "end_to_end/test_parallelism.py"),
    FeatureRow(
        "`--overlap-moe-expert-parallel-comm`",
        "overlap_moe_expert_parallel_comm",
        "end_to_end/test_experts_overlapped.py",
        "",
        "as pairs; [what they do not work with](experts.md#what-does-not-work-with-it)",
    ),
    FeatureRow("multi-token prediction", "mtp_num_layers", "end_to_end/test_multi_token.py"),
    FeatureRow(
        "hybrid models (Mamba)",
        "hybrid_layer_pattern",
        "end_to_end/test_hybrid_trainings.py",
        "",
        "layouts are chosen from 0.18 on",
    ),
    FeatureRow(
        "recomputation: full, selective, planned", "recompute_granularity", "end_to_end/test_recomputed_runs.py"
    ),
    FeatureRow("uneven stages", "pipeline_model_parallel_layout", "end_to_end/test_planned_run.py"),
    FeatureRow("chosen layouts", "", "end_to_end/test_chosen_layout.py", "yes"),
    FeatureRow("V placements", "", "end_to_end/test_v_placement.py", "yes"),
    FeatureRow("variable lengths, packed sequences", "variable_seq_lengths", "launcher/test_launch.py"),
    FeatureRow(
        "tied embeddings",
        "untie_embeddings_and_output_weights",
        "end_to_end/test_numerics.py",
        "",
        "post-validation then gains only in a V",
    ),
    FeatureRow("Adam, SGD", "", "end_to_end/test_post_validation.py", "yes"),
    FeatureRow(
        "Transformer Engine 2.8 and later", "transformer_impl", "mcore/test_transformer_engine.py", "a stand-in was run"
    ),
    FeatureRow(
        "apex, fused accumulation", "gradient_accumulation_fusion", "mcore/test_linear_apex.py", "a stand-in was run"
    ),
    FeatureRow("CUDA graphs", "cuda_graph_impl"),
    FeatureRow("Megatron's activation offloading", "fine_grained_activation_offloading"),
    FeatureRow(
        "`--zero-bubble-offload auto`",
        test="end_to_end/test_offloaded_runs.py",
        status="yes",
        remark="[what it does not work with](recomputation.md#on-the-host)",
    ),
    FeatureRow("ModelOpt", "modelopt_enabled"),
    FeatureRow(
        "vocabulary shards",
        "",
        "mcore/test_vocabulary_stage.py",
        "up to rounding",
        "post-validation then gains nothing",
    ),
    FeatureRow("hierarchical SGD", "", "end_to_end/test_hierarchical_sgd.py", "yes"),
    FeatureRow("saving, resuming", "", "end_to_end/test_resume.py", "yes"),
    FeatureRow("Slurm", "", "slurm/test_slurm.py", "yes", "on CPUs"),
    FeatureRow("GPUs, NCCL", "", "", "**not run**"),
)

_PAGE = """\
# What works with what

<!-- python -m tools.compatibility_page > docs/compatibility.md -->
**yes**: a test compares the numbers, to the last bit. **read**: it follows from the sources, and was not run. **no**:
refused in one line. The third column lists what a feature is refused with. The tests run with
megatron-core 0.16.

| feature | zero bubble | refused with | versions | test |
|---|---|---|---|---|
{rows}

[Megatron's settings](megatron_settings.md) has the flags and fields that are refused or handled, with the reasons, and
[what is tested](tested.md) says what each test compares.
"""


def page() -> str:
    """The text of docs/compatibility.md."""
    return _PAGE.format(rows="\n".join(_shown(row) for row in ROWS))


def _shown(row: FeatureRow) -> str:
    status = row.status or _STATUS[dict(effects())[row.setting]]
    remarks = "; ".join(part for part in (status, row.remark) if part)
    refused = ", ".join(_refused_with(row.setting))
    versions = "" if status == "no" else row.versions
    test = f"`tests/{row.test}`" if row.test else ""
    return f"| {row.title} | {remarks} | {refused} | {versions} | {test} |"


def _refused_with(setting: str) -> Iterator[str]:
    """The features that a setting is refused with, each with the values for which it is."""
    for refusal in REFUSALS:
        if setting in refusal.names.split() and not refusal.is_unconditional:
            features = " and ".join(_name(feature) for feature in refusal.features) or "every schedule"
            yield f"{features} ({refusal.condition})" if refusal.condition else features


def _name(feature: Feature) -> str:
    return f"`{feature.value}`" if feature.value.startswith("--") else feature.value


if __name__ == "__main__":
    print(page(), end="")
