"""Mistakes that can be seen in the script's arguments before it starts, and would be told after hundreds of lines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.zero_bubble.job.environment import check_num_ranks
from megatron.zero_bubble.job.flag_parser import flag, take_flags
from megatron.zero_bubble.job.plans import check_stages, choose_placement, choose_plan, chunks_of_flags
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.mistakes import users_mistakes
from megatron.zero_bubble.launcher.script_settings import settings_of
from megatron.zero_bubble.training.arguments import ParallelFlags

_READ_ELSEWHERE = (
    *("--use-checkpoint-args", "--yaml-cfg", "--hybrid-layer-pattern", "--hybrid-override-pattern"),
    *("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
)
"""Flags of Megatron-LM by which layers or parallel sizes come from somewhere else."""


@dataclass
class _SizeFlags:
    """Sizes."""

    num_layers: int | None = flag("number of transformer layers", None)
    mtp_num_layers: int | None = flag("layers that predict further tokens", None)
    micro_batch_size: int | None = flag("sequences in a microbatch", None)
    global_batch_size: int | None = flag("sequences in an iteration", None)


@dataclass
class _ShapeFlags(ParallelFlags, _SizeFlags):
    """The part of Megatron-LM's flags that says how many ranks, stages, layers and microbatches there are."""


def check_script_arguments(flags: LaunchFlags, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse numbers of ranks, stages, layers and microbatches that do not go together.

    Raises:
        LauncherError: the first thing found; Megatron-LM or our own checks would refuse it later.
    """
    if any(argument.split("=")[0] in _READ_ELSEWHERE for argument in arguments):
        return
    with users_mistakes():
        shape, _ = take_flags(_ShapeFlags, (ParallelFlags, _SizeFlags), arguments)
        world_size = int(environment.get("WORLD_SIZE", "1"))
        ranks = shape.tensor_model_parallel_size * shape.pipeline_model_parallel_size * shape.context_parallel_size
        replicas = max(1, world_size // ranks)
        script = Namespace(**vars(shape), world_size=world_size, data_parallel_size=replicas)
        script.virtual_pipeline_model_parallel_size = script.rampup_batch_size = None
        settings = settings_of(script, flags)
        check_num_ranks(settings)
        if (
            shape.num_layers is None
            or shape.micro_batch_size is None
            or shape.pipeline_model_parallel_layout is not None
        ):
            return
        step = shape.micro_batch_size * replicas
        settings.global_batch_size = step if shape.global_batch_size is None else shape.global_batch_size
        if settings.global_batch_size % step == 0:
            settings.model_chunks = chunks_of_flags(settings)
            check_stages(settings, choose_placement(settings, choose_plan(settings)))
