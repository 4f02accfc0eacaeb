"""Defines the flags of parallelism and of zero bubble, which the trainer and the launcher share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron.zero_bubble.planner.registry import entry_of
from megatron.zero_bubble.schedule.errors import UnknownSchedule
from megatron.zero_bubble.session.aliases import check_window, pending_backwards
from megatron.zero_bubble.session.flag_parser import flag

SCHEDULE_FILE = "file:"
"""Prefix of a value of `--zero-bubble-schedule` that names a file."""
CHUNK_FLAGS = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
"""Names of the flags that set nothing but the number of model chunks on a rank."""


@dataclass(frozen=True)
class ParallelFlags:
    """Parallelism."""

    tensor_model_parallel_size: int = flag("ranks that share each layer", 1)
    pipeline_model_parallel_size: int = flag("pipeline ranks", 1)
    context_parallel_size: int = flag("ranks that share each sequence", 1)
    expert_model_parallel_size: int = flag("ranks of a stage that share the experts", 1)
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "layers in a model chunk, to have several chunks on a rank"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag("model chunks on a rank")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        "microbatches that a chunk runs before the rank's next chunk runs (default: pipeline size)"
    )
    pipeline_model_parallel_layout: str | None = flag("layers of each stage, in megatron-core's notation")
    decoder_first_pipeline_num_layers: int | None = flag(
        "layers of the first pipeline rank; in a V, of the first stage"
    )
    decoder_last_pipeline_num_layers: int | None = flag("layers of the last pipeline rank; in a V, of the last stage")
    account_for_embedding_in_pipeline_split: bool = flag("count the embedding as a layer of the first stage", False)
    account_for_loss_in_pipeline_split: bool = flag("count the loss as a layer of the last stage", False)
    allow_padding_num_layers: bool = flag("allow a number of layers that the stages do not divide", False)
    use_torch_fsdp2: bool = flag(
        "shard parameters, gradients and the optimizer's state over data-parallel ranks with torch's FSDP2", False
    )
    torch_fsdp2_no_reshard_after_forward: bool = flag(
        "keep the parameters that --use-torch-fsdp2 has gathered until the end of the step", False
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        "let plans run a forward and a backward as one operation, in which one of them computes while the other "
        "exchanges tokens between experts (docs/experts.md)",
        False,
    )
    distributed_backend: str | None = flag(
        "torch.distributed backend (default: nccl, gloo without CUDA)", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag("minutes after which a collective gives up", 10)

    @property
    def ranks_of_replica(self) -> int:
        """The number of ranks that hold one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(frozen=True)
class ReplicaFlags:
    """Replicas."""

    hierarchical_sgd: str | None = flag(
        "PERIOD:SIZE,PERIOD:SIZE,...: step on each replica's own gradients, and average parameters in groups of SIZE "
        "replicas every PERIOD iterations; the last group is all replicas (docs/replicas.md)"
    )
    hierarchical_sgd_warmup: int = flag(
        "iterations, from the start of the training, that reduce gradients over all replicas before "
        "--hierarchical-sgd begins",
        0,
    )


@dataclass(frozen=True)
class ZeroBubbleFlags:
    """Zero bubble."""

    zero_bubble: bool = flag(
        "choose layers, chunks and placement of the ranks, and run the schedule planned for them", False
    )
    zero_bubble_schedule: str | None = flag(
        "schedule to run on the layout of Megatron's flags: a name in docs/schedules.md, or file:PATH of a file that "
        "zero-bubble schedule wrote"
    )
    zero_bubble_keep_layout: bool = flag(
        "keep the layers, chunks and placement of Megatron's flags, and plan only the order of operations", False
    )
    zero_bubble_placement: str | None = flag(
        "placement of the chunks: linear (one a rank), interleaved or v (default: the fastest of these)",
        choices=("linear", "interleaved", "v"),
    )
    zero_bubble_vocabulary_parallel: str | None = flag(
        "on: spread embedding and output layer over all pipeline ranks; auto: where that is faster (default: auto "
        "where the layout is chosen, otherwise off; without a value: on)",
        choices=("on", "off", "auto"),
        nargs="?",
        const="on",
    )
    zero_bubble_strict: bool = flag("refuse a model with a weight whose gradient cannot be deferred", False)
    zero_bubble_no_strict: bool = flag(
        "train a model although W is not deferred for some of its linear layers; without this flag it is refused", False
    )
    zero_bubble_memory_limit: str | None = flag(
        "memory for activations: a multiple of 1F1B's peak (1.5), bytes (40GiB), or auto: nine tenths of free memory "
        "(default: the peak of megatron-core's own schedule: 1F1B, or interleaved 1F1B)"
    )
    zero_bubble_recompute: str | None = flag(
        "planned: recompute a microbatch's forward only where the memory limit leaves no room for its activations "
        "(without a value: planned)",
        choices=("planned",),
        nargs="?",
        const="planned",
    )
    zero_bubble_offload: str | None = flag(
        "auto: copy activations to host memory and back where that makes a plan within --zero-bubble-memory-limit "
        "faster; the copies are measured in the profiled iterations (default: off)",
        choices=("off", "auto"),
    )
    zero_bubble_microbatch_order: str | None = flag(
        "order in which a step takes its microbatches: planned from their lengths, or the order of the data "
        "(default: planned where lengths vary, as with --variable-seq-lengths)",
        choices=("planned", "data"),
    )
    zero_bubble_profile_iters: list[int] | None = flag(
        "START END: first and last iteration to profile, counted from the start of this job; 0 0: none (default: 3 6)",
        nargs=2,
    )
    zero_bubble_profile_output: str | None = flag("file to write the measured costs to")
    zero_bubble_unit_costs_output: str | None = flag(
        "file for the measured costs of the model's layers, which zero-bubble plan reads"
    )
    zero_bubble_profile_input: str | None = flag("file of measured costs, from which to plan at the start")
    zero_bubble_replan_threshold: float = flag(
        "plan again when a stage's time has changed by this fraction; 0: never", 0.0
    )
    zero_bubble_post_validation: bool = flag(
        "step before the norm of all gradients is known, and validate the step later", False
    )
    zero_bubble_rollback: str | None = flag(
        "how a wrong step is undone: snapshot restores a copy, inverse inverts AdamW (default: snapshot)",
        choices=("snapshot", "inverse"),
    )
    zero_bubble_rollback_on_host: bool = flag("keep the snapshot's copy in host memory", False)
    zero_bubble_seed_by_layer: bool = flag(
        "draw each layer's initial weights and dropout from the layer's own seed, whatever its rank; pretrain_gpt.py "
        "takes it without a schedule, too",
        False,
    )
    zero_bubble_timeline: str | None = flag("folder for drawings and traces of every rank's operations")
    zero_bubble_timeline_iters: list[int] | None = flag(
        "FIRST LAST: the iterations to draw (default: the two iterations after the profile)", nargs=2
    )
    zero_bubble_timeout: float | None = flag(
        "seconds that one operation may take before the job ends and reports where every rank is; 0: no limit "
        "(default: nine tenths of --distributed-timeout-minutes)"
    )
    zero_bubble_communicator: str | None = flag(
        "host: send messages between stages through host memory and gloo, to tell a fault of NCCL from a fault of the "
        "schedule (default: the backend's own channels)",
        choices=("host",),
    )

    @property
    def asks_for_schedule(self) -> bool:
        """Whether the flags ask for a zero-bubble schedule; otherwise megatron-core's own schedule runs."""
        return self.zero_bubble or self.zero_bubble_schedule is not None

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether the flags ask for vocabulary shards on all ranks; False if the flags leave the choice open."""
        return self.zero_bubble_vocabulary_parallel == "on"


def flag_name(name: str) -> str:
    """The flag of a field as the user writes it, such as `--num-layers` for `num_layers`."""
    return f"--{name.replace('_', '-')}"


def check_zero_bubble_flags(flags: ZeroBubbleFlags) -> None:
    """Refuse zero-bubble flags that are invalid or contradict each other, regardless of the model.

    Raises:
        ValueError: a flag is invalid or contradicts another flag; the message names the first such flag.
    """
    _check_owners(flags)
    name = flags.zero_bubble_schedule
    if name is not None and not name.startswith(SCHEDULE_FILE):
        try:
            entry_of(name)
        except UnknownSchedule as error:
            raise ValueError(f"--zero-bubble-schedule {name}: {error}") from None
    if flags.zero_bubble_rollback == "inverse" and flags.zero_bubble_rollback_on_host:
        raise ValueError("--zero-bubble-rollback-on-host needs --zero-bubble-rollback snapshot: inverse keeps no copy")
    if flags.zero_bubble_strict and flags.zero_bubble_no_strict:
        raise ValueError("--zero-bubble-strict and --zero-bubble-no-strict contradict each other: give one of them")
    threshold = flags.zero_bubble_replan_threshold
    if not 0 <= threshold < math.inf:
        raise ValueError(f"--zero-bubble-replan-threshold must be at least 0, got {threshold}")
    if flags.zero_bubble_profile_iters is not None:
        first, last = flags.zero_bubble_profile_iters
        check_window(first, last, "--zero-bubble-profile-iters")
    if flags.zero_bubble_timeline_iters is not None:
        first, last = flags.zero_bubble_timeline_iters
        if flags.zero_bubble_timeline is None:
            raise ValueError(f"--zero-bubble-timeline-iters {first} {last} needs --zero-bubble-timeline FOLDER")
        if not 1 <= first <= last:
            raise ValueError(f"--zero-bubble-timeline-iters {first} {last}: give the first and the last iteration")


def _check_owners(flags: ZeroBubbleFlags) -> None:
    """Raise `ValueError` for a flag that has no effect because a flag that it needs is not given."""
    rollback = ("zero_bubble_rollback", "zero_bubble_rollback_on_host")
    for entry in fields(ZeroBubbleFlags) if not flags.asks_for_schedule else ():
        if entry.name not in (*rollback, "zero_bubble_seed_by_layer") and getattr(flags, entry.name) != entry.default:
            given = limit_flag(flags).split()[0] if entry.name == "zero_bubble_memory_limit" else flag_name(entry.name)
            raise ValueError(f"{given} needs --zero-bubble or --zero-bubble-schedule")
    for name in rollback:
        if not flags.zero_bubble_post_validation and getattr(flags, name):
            raise ValueError(f"{flag_name(name)} needs --zero-bubble-post-validation")


def limit_flag(flags: ZeroBubbleFlags) -> str:
    """Name and value of the flag that sets the memory limit, as text for error messages."""
    text = flags.zero_bubble_memory_limit or "1 (the default)"
    pending = pending_backwards(text)
    return f"--zero-bubble-memory-limit {text}" if pending is None else f"--zero-bubble-max-pending-backward {pending}"


def flags_text(flags: Mapping[str, Any]) -> str:
    """The command-line text for the names and values in `flags`; a flag whose value is None is left out."""
    words = []
    for name, value in {flag_name(name): value for name, value in flags.items() if value is not None}.items():
        # A value that begins with - would be read as another flag after a space.
        separator = "=" if str(value).startswith("-") else " "
        words.append(name if value is True else f"{name}{separator}{shlex.quote(str(value))}")
    return " ".join(words)
