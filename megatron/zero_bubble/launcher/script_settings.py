"""The run's settings, as our own trainer has them: the script's arguments by name, and our flags."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import MISSING, dataclass, fields
from typing import Any

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.mistakes import LauncherError
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments

_REFUSED = {
    "use_torch_fsdp2": "it shards the gradients that W adds up",
    "use_megatron_fsdp": "it shards the gradients that W adds up",
    "use_legacy_models": "its layers are not megatron-core's",
    "overlap_moe_expert_parallel_comm": "it is a schedule of its own",
    "delay_wgrad_compute": "it puts off W by itself",
    "defer_embedding_wgrad_compute": "it puts off the output layer's W by itself",
    "hybrid_context_parallel": "it is a schedule of its own",
    "perform_rl_step": "its rollouts run through megatron-core's schedule",
    "tp_comm_overlap": "Transformer Engine's userbuffers cannot leave W for later",
}
"""Settings of the script that no schedule of ours can honour, and why."""
_REFUSED_IN_V = {
    "num_layers_per_virtual_pipeline_stage": "it is megatron-core's interleaved placement",
    "mtp_num_layers": "it is a part of the last rank's stage, and the loss is on the first",
    "heterogeneous_layers_config_path": "stages take their layers in another order",
}


@dataclass
class ScriptSettings(Arguments):
    """`Arguments` with what Megatron-LM counts in its own way."""

    script_data_parallel_size: int = 1

    @property
    def data_parallel_size(self) -> int:
        return self.script_data_parallel_size


def settings_of(script: Namespace, flags: LaunchFlags) -> ScriptSettings:
    """The settings of a script that has parsed and validated its arguments.

    Args:
        script: what Megatron-LM's `get_args()` returns. Names that it lacks get our trainer's defaults.
    """
    values: dict[str, Any] = {}
    for entry in fields(ScriptSettings):
        if hasattr(flags, entry.name):
            values[entry.name] = getattr(flags, entry.name)
        elif hasattr(script, entry.name):
            values[entry.name] = getattr(script, entry.name)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            values[entry.name] = None
    settings = ScriptSettings(**values)
    settings.script_data_parallel_size = script.data_parallel_size
    layout = getattr(script, "pipeline_model_parallel_layout", None)
    settings.pipeline_model_parallel_layout = str(layout) if layout is not None else None
    settings.model_chunks = script.virtual_pipeline_model_parallel_size
    settings.microbatch_group_size_per_virtual_pipeline_stage = getattr(
        script, "microbatch_group_size_per_vp_stage", None
    )
    if settings.rampup_batch_size is not None:
        settings.rampup_batch_size = [int(size) for size in settings.rampup_batch_size]
    return settings


def refuse_what_cannot_work(script: Namespace, settings: ScriptSettings, placement: Placement) -> None:
    """Refuse settings of the script that contradict the schedule.

    Raises:
        LauncherError: the first one found.
    """
    refused = {**_REFUSED, **(_REFUSED_IN_V if placement.kind == "v" else {})}
    for name, reason in refused.items():
        value = getattr(script, name, None)
        if value:
            flag = f"--{name.replace('_', '-')}" + (f" {value}" if value is not True else "")
            raise LauncherError(f"{flag} does not go with --zero-bubble-schedule {settings.schedule}: {reason}")
    if getattr(script, "cuda_graph_impl", "none") != "none":
        raise LauncherError(f"--cuda-graph-impl {script.cuda_graph_impl} records a whole backward: leave it out")
    for name in ("fp8", "fp4"):
        if getattr(script, name, None) and getattr(script, "add_bias_linear", True):
            raise LauncherError(
                f"--{name}-format {getattr(script, name)} goes with --zero-bubble-schedule {settings.schedule} only "
                "under --disable-bias-linear: Transformer Engine loses biases' gradients where W comes later than B"
            )
    built = script.virtual_pipeline_model_parallel_size or 1
    if placement.num_chunks != built:
        raise LauncherError(
            f"schedule {settings.schedule} has {placement.num_chunks} model chunks a rank, but the script builds "
            f"{built}: give it --num-virtual-stages-per-pipeline-rank {placement.num_chunks}"
        )
