"""Finds mistakes in the script's arguments before it starts; otherwise they show after hundreds of lines of output."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.script_settings import divide_pattern, flags_of
from megatron.zero_bubble.session.environment import check_num_ranks
from megatron.zero_bubble.session.flag_parser import flag, take_flags
from megatron.zero_bubble.session.flags import ParallelFlags
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.layers import chunks_of_flags, partition_of_flags
from megatron.zero_bubble.session.layout_choice import is_layout_open
from megatron.zero_bubble.session.plans import choose_placement, choose_plan
from megatron.zero_bubble.session.start_up import users_mistakes

_READ_ELSEWHERE = (
    *("--use-checkpoint-args", "--yaml-cfg"),
    *("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
)
"""Flags of Megatron-LM that take layers or parallel sizes from a file or checkpoint, not from the arguments."""


@dataclass(frozen=True)
class _SizeFlags:
    """Sizes."""

    num_layers: int | None = flag("number of transformer layers", None)
    hybrid_layer_pattern: str | None = flag("layers of a hybrid model, one symbol each", None)
    hybrid_override_pattern: str | None = flag("the older name of --hybrid-layer-pattern", None)
    mtp_num_layers: int | None = flag("layers that predict further tokens", None)
    micro_batch_size: int | None = flag("sequences in a microbatch", None)
    global_batch_size: int | None = flag("sequences in an iteration", None)


@dataclass(frozen=True)
class _ShapeFlags(ParallelFlags, _SizeFlags):
    """Megatron-LM's flags that set the number of ranks, stages, layers and microbatches."""


def check_script_arguments(flags: LaunchFlags, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse numbers of ranks, stages, layers and microbatches that contradict each other.

    Raises:
        SessionError: the first contradiction; Megatron-LM or the checks of `Run` would refuse it later.
    """
    if any(argument.split("=")[0] in _READ_ELSEWHERE for argument in arguments):
        return
    with users_mistakes():
        shape, _ = take_flags(_ShapeFlags, (ParallelFlags, _SizeFlags), arguments)
        world_size = int(environment.get("WORLD_SIZE", "1"))
        check_num_ranks(shape, world_size)
        given = Namespace(**vars(shape))
        given.hybrid_layer_pattern = given.hybrid_layer_pattern or given.hybrid_override_pattern
        if given.hybrid_layer_pattern is not None:
            divide_pattern(given, flags)
            shape = replace(shape, num_layers=len(HybridPattern.parse(given.hybrid_layer_pattern).symbols))
        if shape.num_layers is None:
            return
        if shape.micro_batch_size is None:
            raise ValueError("--micro-batch-size is missing: give the number of sequences in a microbatch")
        # Reading a layout imports megatron-core, which `Launch` first prepares for a machine without CUDA.
        if shape.pipeline_model_parallel_layout:
            return
        replicas = world_size // shape.ranks_of_replica
        step = shape.micro_batch_size * replicas
        known = {
            "world_size": world_size,
            "data_parallel_size": replicas,
            "global_batch_size": step if shape.global_batch_size is None else shape.global_batch_size,
        }
        job = flags_of(given, flags, **known)
        if job.global_batch_size % step == 0:
            job = replace(job, model_chunks=chunks_of_flags(job))
            if is_layout_open(job):
                return
            partition_of_flags(job, choose_placement(job, choose_plan(job)))
