"""Reads a script's arguments about its pipeline, and refuses those that no zero-bubble schedule supports."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any

from megatron.zero_bubble.job.flags import flag_name
from megatron.zero_bubble.job.hybrid_pattern import HybridPattern
from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.job.layers import spread_layers
from megatron.zero_bubble.job.plans import choose_placement, choose_plan
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.mistakes import LauncherError
from megatron.zero_bubble.mcore.refused_settings import REFUSED
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Placement

_REFUSED = {
    **REFUSED,
    "use_torch_fsdp2": "Megatron-LM refuses it with pipelines, but pretrain_gpt.py of this project runs it",
    "use_megatron_fsdp": "it shards gradients, but W accumulates whole ones",
    "use_legacy_models": "its layers are not megatron-core's",
    "delay_wgrad_compute": "it defers W too",
    "defer_embedding_wgrad_compute": "it defers the output layer's W too",
    "hybrid_context_parallel": "it brings its own pipeline schedule",
    "perform_rl_step": "its rollouts need megatron-core's own schedule",
}
"""Settings of the script that no zero-bubble schedule supports, and why."""
_REFUSED_IN_V = {
    "num_layers_per_virtual_pipeline_stage": "it asks for megatron-core's interleaved placement, not a V",
    "heterogeneous_layers_config_path": "in a V, stages take their layers in another order",
}

_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that hold a pattern: Megatron-LM's, and its older name, which it copies to the other."""
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def flags_of(script: Namespace, flags: LaunchFlags, **known: Any) -> JobFlags:
    """The job's flags from a script's arguments and the launcher's flags.

    Args:
        script: the result of Megatron-LM's `get_args()`, or arguments that are not validated yet. Names that it lacks
            get the defaults of `JobFlags`.
        known: values that replace those of the script.
    """
    layout = getattr(script, "pipeline_model_parallel_layout", None)
    ramp = getattr(script, "rampup_batch_size", None)
    ours = {entry.name: getattr(flags, entry.name) for entry in fields(JobFlags) if hasattr(flags, entry.name)}
    pattern = getattr(script, "hybrid_layer_pattern", None)
    in_its_words: dict[str, Any] = {
        "pipeline_model_parallel_layout": str(layout) if layout is not None else None,
        "model_chunks": getattr(script, "virtual_pipeline_model_parallel_size", None),
        "microbatch_group_size_per_virtual_pipeline_stage": getattr(script, "microbatch_group_size_per_vp_stage", None),
        "rampup_batch_size": [int(size) for size in ramp] if ramp is not None else None,
    }
    if pattern is not None:
        in_its_words["num_layers"] = len(HybridPattern.parse(pattern).symbols)
    return JobFlags.of(script, **{**in_its_words, **ours, **known})


def refuse_what_cannot_work(script: Namespace, flags: JobFlags) -> None:
    """Refuse settings of the script that contradict the schedule.

    Raises:
        ValueError: the first contradiction, or a reason why the schedule cannot be planned.
    """
    placement = choose_placement(flags, choose_plan(flags))
    refused = {**_REFUSED, **(_REFUSED_IN_V if placement.kind == "v" else {})}
    for name, reason in refused.items():
        value = getattr(script, name, None)
        if value:
            flag = flag_name(name) + (f" {value}" if value is not True else "")
            raise LauncherError(f"{flag} does not work with --zero-bubble-schedule {flags.schedule}: {reason}")
    if flags.zero_bubble_post_validation and getattr(script, "moe_expert_rank_capacity_factor", None) is not None:
        raise LauncherError(
            "--moe-expert-rank-capacity-factor does not work with --zero-bubble-post-validation: both run steps again"
        )
    if getattr(script, "cuda_graph_impl", "none") != "none":
        raise LauncherError(f"--cuda-graph-impl {script.cuda_graph_impl} records B and W in one graph: leave it out")
    has_local_attention = getattr(script, "transformer_impl", None) == "local" and not getattr(script, "spec", None)
    if getattr(script, "sft", False) and has_local_attention:
        raise LauncherError(
            "--sft packs sequences, which megatron-core's local attention cannot tell apart: give "
            "--transformer-impl transformer_engine, which needs a GPU, or --spec with an attention that can"
        )
    for name in ("fp8", "fp4"):
        if getattr(script, name, None) and getattr(script, "add_bias_linear", True):
            raise LauncherError(
                f"--{name}-format {getattr(script, name)} works with --zero-bubble-schedule {flags.schedule} only "
                "if --disable-bias-linear is given: Transformer Engine loses the gradients of biases if W is deferred"
            )


def check_chunks(script: Namespace, flags: JobFlags, placement: Placement) -> None:
    """Check that a script builds as many model chunks a rank as the placement has.

    Raises:
        LauncherError: it builds another number.
    """
    built = script.virtual_pipeline_model_parallel_size or 1
    if placement.num_chunks != built:
        remedy = f"give it --num-virtual-stages-per-pipeline-rank {placement.num_chunks}"
        if flags.pattern is not None:
            remedy = f"give it a --hybrid-layer-pattern of {placement.num_stages} stages, with | between them"
        elif getattr(script, "hybrid_override_pattern", None) is not None:
            remedy = "its hybrid model allows no more than one: choose another schedule"
        raise LauncherError(
            f"schedule {flags.schedule} has {placement.num_chunks} model chunks a rank, but the script builds "
            f"{built}: {remedy}"
        )


def divide_pattern(script: Namespace, flags: LaunchFlags) -> None:
    """Put `|`s into the pattern of unvalidated arguments where Megatron-LM would not divide it as the schedule needs.

    It divides a pattern without `|` into one chunk a rank, all with the same number of layers.

    Raises:
        LauncherError: further arguments say how many layers a rank has.
    """
    entry = ENTRIES.get(flags.zero_bubble_schedule or "")
    num_chunks = 1 if entry is None else entry.num_chunks
    if not hasattr(script, _PATTERNS[0]) or not (num_chunks > 1 or flags.allow_padding_num_layers):
        return
    for name in _PATTERNS:
        if not (text := getattr(script, name, None)) or (pattern := HybridPattern.parse(text)).is_divided:
            continue
        if any(getattr(script, end, None) is not None for end in _ENDS):
            raise LauncherError(
                f"--hybrid-layer-pattern {text}: with {num_chunks} model chunks a rank its | say which layers a stage "
                "has: leave out --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        num_stages = script.pipeline_model_parallel_size * num_chunks
        setattr(script, name, str(pattern.divided(spread_layers(len(pattern.symbols), num_stages))))
