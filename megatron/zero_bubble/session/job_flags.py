"""The flags that determine a job's pipeline, as parsed by the trainer or by a Megatron-LM script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any

from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule.formats import Setting
from megatron.zero_bubble.schedule.recomputation import Recompute, recomputes_blocks
from megatron.zero_bubble.session.aliases import pending_backwards
from megatron.zero_bubble.session.flags import ParallelFlags, ReplicaFlags, ZeroBubbleFlags, limit_flag
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern

_PARTITION = (
    "hybrid_layer_pattern",
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
)
RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""Names of Megatron's flags that set the recomputation."""
FULL_RECOMPUTATION: Mapping[str, Any] = dict(zip(RECOMPUTATION, ("full", "uniform", 1), strict=True))
"""Names and values of Megatron's flags with which every layer is recomputed, each for itself."""
_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("seq_length", "micro_batch_size", "bf16", "fp16", "fp8", "fp4", "swiglu", "num_experts", "mtp_num_layers"),
    *("transformer_impl", "attention_backend", "multi_latent_attention"),
    *("tensor_model_parallel_size", "expert_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *(*_PARTITION, *RECOMPUTATION, "zero_bubble_recompute", "zero_bubble_vocabulary_parallel"),
)
"""Names of the flags on which the costs of a stage depend in every model."""
_SWITCHES = re.compile(
    r"window_.*|no_rope_freq|(qk|q|k)_(layer|l2_)norm|add_qkv_bias|.*attention_(output_gate|variant|freq)|dsa_.*(heads|dim|topk)"
    r"|fp32_residual_connection|recompute_modules"
    r"|tp_comm_overlap|activation_func_(fp8|clamp).*|squared_relu|quick_geglu"
)
"""Pattern for names of further flags that change the costs of a stage; a training program may lack some of these."""
_FURTHER = {
    "num_experts": re.compile(
        r"moe_(?!.*(_coeff|_rate|_scaling_factor|_eps|upcycling|logging|inference)).*|expert_tensor_parallel_size"
    ),
    "multi_latent_attention": re.compile(r"(q|kv)_lora_rank|(qk|qk_pos_emb|v)_head_dim"),
    "hybrid_layer_pattern": re.compile(
        r"mamba_(state_dim|head_dim|num_groups|num_heads)|linear_((conv_kernel|(key|value)_head)_dim|num_(key|value)_heads)"
    ),
}
"""Flag A -> pattern for the names of flags that change the costs of a stage only if A is set."""
_IN_CONFIGURATION = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}
"""Flag -> name of the corresponding field of megatron-core's `TransformerConfig`, if the names differ."""
SEEN_IN_COSTS = ("zero_bubble_recompute", "zero_bubble_vocabulary_parallel")
"""Names of the flags in `_MODEL` that are compared with the costs of a profile, and not with the profiled job's flags,
because the profiled job may have chosen their values."""
LAYOUT_SETTINGS = (*_PARTITION, *SEEN_IN_COSTS)
"""Names of the flags in `_MODEL` that zero bubble sets when it chooses a layout."""


def keeping_everything(settings: object) -> dict[str, Any]:
    """Return names and values of flags that turn full recomputation off; an empty dictionary if it is already off."""
    return dict.fromkeys(RECOMPUTATION) if getattr(settings, "recompute_granularity", None) == "full" else {}


@dataclass(frozen=True)
class JobFlags(ParallelFlags, ReplicaFlags, ZeroBubbleFlags):
    """The part of the trainer's flags, or of a Megatron-LM script's arguments, that affects the pipeline."""

    rank: int = 0
    world_size: int = 1
    data_parallel_size: int = 1
    model_chunks: int | None = None
    """Number of model chunks on a rank, if Megatron's flags ask for several; None leaves the number to the schedule."""
    num_layers: int = 0
    mtp_num_layers: int | None = None
    hybrid_layer_pattern: str | None = None
    """The layers of a `HybridModel`, with `|` between stages if the flags or the chosen layout divide the layers."""
    micro_batch_size: int = 1
    global_batch_size: int = 1
    rampup_batch_size: list[int] | None = None
    step_batch_sizes: tuple[int, ...] | None = None
    """Global batch sizes of `--step-batch-size-schedule`, ascending; None without the flag. Megatron-LM then sets
    `global_batch_size` to the size of one microbatch on every replica."""
    train_iters: int | None = None
    """Iterations of the whole training; None if a script counts samples instead of iterations."""
    exit_interval: int | None = None
    seed: int = 1234
    optimizer: str = "adam"
    use_distributed_optimizer: bool = False
    fp16: bool = False
    transformer_impl: str = "local"
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    fp8: str | None = None
    fp8_recipe: str | None = "delayed"
    fp4: str | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    moe_input_jitter_eps: float | None = None
    untie_embeddings_and_output_weights: bool = False
    make_vocab_size_divisible_by: int = 128
    calculate_per_token_loss: bool = False
    variable_seq_lengths: bool = False
    log_num_zeros_in_grad: bool = False
    timing_log_level: int = 0
    zero_bubble_layout_limits: tuple[float, ...] | None = None
    """The memory limit of each rank, in bytes; a checkpoint records these limits together with the chosen layout."""
    given_model: Mapping[str, Setting] = field(default_factory=dict)
    """The flags on which the costs of a stage depend, as the user gave them; a chosen layout does not change them."""

    @classmethod
    def of(cls, source: object, **known: Any) -> JobFlags:
        """Read the flags from attributes of `source`; keyword arguments override attributes and defaults."""
        given = {entry.name: getattr(source, entry.name) for entry in fields(cls) if hasattr(source, entry.name)}
        return cls(**{**given, "given_model": _model_of(source), **known})

    @property
    def schedule(self) -> str | None:
        """Name of the zero-bubble schedule that the flags ask for, or None for megatron-core's own schedule."""
        return self.zero_bubble_schedule or ("auto" if self.zero_bubble else None)

    @property
    def recompute(self) -> Recompute:
        """The kind of recomputation in the schedule: none, full or planned."""
        if self.zero_bubble_recompute == Recompute.PLANNED:
            return Recompute.PLANNED
        return Recompute.FULL if recomputes_blocks(self) else Recompute.NONE

    @property
    def layers_of_block(self) -> int:
        """The number of layers that are recomputed together, as one block."""
        return self.recompute_num_layers or 1 if self.recompute_method == "uniform" else 1

    @property
    def interlocks_iterations(self) -> bool:
        """Whether a rank can begin the next iteration while other ranks are still in the current iteration."""
        return self.zero_bubble_post_validation and self.untie_embeddings_and_output_weights

    @property
    def has_own_limit(self) -> bool:
        """Whether the schedule defines its own memory limit; other schedules use all memory that the flags allow."""
        entry = ENTRIES.get(self.schedule or "")
        return entry is None or entry.has_own_limit

    @cached_property
    def memory_limit(self) -> MemoryLimit | None:
        """The memory limit that the flags set; None if the schedule's own limit applies.

        Raises:
            ValueError: the value of the flag for the memory limit cannot be parsed.
        """
        text = self.zero_bubble_memory_limit
        if text is None:
            # By default a schedule without a limit of its own may take as much memory as megatron-core's own schedule.
            return None if self.has_own_limit else self.peak_of_megatron(is_interleaved=self.model_chunks is not None)
        pending = pending_backwards(text)
        if pending is not None and pending != "auto":
            if not pending.isdigit() or pending == "0":
                raise ValueError(f"{limit_flag(self)} is neither auto nor a number of forwards")
            return MemoryLimit(multiple=int(pending) / self.pipeline_model_parallel_size)
        try:
            return MemoryLimit.parse(pending or text)
        except ValueError as error:
            raise ValueError(f"--zero-bubble-memory-limit: {error}") from error

    def peak_of_megatron(self, *, is_interleaved: bool) -> MemoryLimit:
        """The memory limit that equals the peak memory of megatron-core's own schedule, 1F1B or interleaved 1F1B."""
        size = self.microbatch_group_size_per_virtual_pipeline_stage
        return MemoryLimit(1.0, None, is_interleaved, self.overlap_moe_expert_parallel_comm, size)

    @property
    def moe_router_load_balancing_type(self) -> Setting:
        """The kind or kinds of the experts' auxiliary loss; None without experts."""
        return self.given_model.get("moe_router_load_balancing_type")

    @property
    def pairs(self) -> bool:
        """Whether a plan may run a forward and a backward as one operation; False with vocabulary shards."""
        return self.overlap_moe_expert_parallel_comm and not self.vocabulary_parallel

    @property
    def model(self) -> Mapping[str, Setting]:
        """The flags and values that a profile records, including the layout of the job."""
        layout = ("pipeline_model_parallel_layout", "hybrid_layer_pattern")
        return {**self.given_model, **{name: getattr(self, name) for name in layout}}

    @property
    def pattern(self) -> HybridPattern | None:
        """The layer pattern of a `HybridModel`; None for another model."""
        return None if self.hybrid_layer_pattern is None else HybridPattern.parse(self.hybrid_layer_pattern)

    @property
    def batch_sizes(self) -> Sequence[int]:
        """All global batch sizes of the job's iterations, ascending; a single size unless a flag changes the size."""
        if self.step_batch_sizes is not None:
            step = self.micro_batch_size * self.data_parallel_size
            # Sizes for fewer replicas may remain in the schedule of a job that has got more replicas.
            return [size for size in self.step_batch_sizes if size % step == 0] or self.step_batch_sizes
        start, increment, _ = self.rampup_batch_size or (self.global_batch_size, 1, 0)
        return range(start, self.global_batch_size + 1, increment)

    @property
    def most_microbatches(self) -> int:
        """Number of microbatches on one data-parallel rank in the iteration with the largest global batch."""
        return self.num_microbatches(self.batch_sizes[-1])

    def num_microbatches(self, batch_size: int) -> int:
        """Number of microbatches on one data-parallel rank in an iteration of `batch_size` sequences."""
        return batch_size // (self.micro_batch_size * self.data_parallel_size)

    def num_iterations(self, start: int) -> int | None:
        """Maximum number of iterations of a job that continues after iteration `start`; None without a limit."""
        limits = [] if self.train_iters is None else [self.train_iters - start]
        if self.exit_interval:
            limits.append(self.exit_interval - start % self.exit_interval)
        return max(0, min(limits)) if limits else None


def _model_of(source: object) -> dict[str, Setting]:
    """The settings in `source` on which the costs of a stage depend, with Megatron-LM's names and defaults."""
    model = {name: getattr(source, name, getattr(source, _IN_CONFIGURATION.get(name, ""), None)) for name in _MODEL}
    for names in (_SWITCHES, *(names for owner, names in _FURTHER.items() if model[owner])):
        model.update((name, value) for name, value in vars(source).items() if names.fullmatch(name))
    if model["num_experts"]:  # Megatron-LM's two defaults for experts
        model["moe_ffn_hidden_size"] = model.get("moe_ffn_hidden_size") or model["ffn_hidden_size"]
        shared_by = model.get("expert_tensor_parallel_size") or model["tensor_model_parallel_size"]
        model["expert_tensor_parallel_size"] = shared_by
    if not getattr(source, "group_query_attention", True):
        model["num_query_groups"] = model["num_attention_heads"]  # Megatron-LM's arguments then have 1 query group
    if isinstance(model["attention_backend"], Enum):  # Megatron-LM's enum; local layers have one backend
        is_local = model["transformer_impl"] == "local"
        model["attention_backend"] = "local" if is_local else model["attention_backend"].name
    return {name: _as_in_json(value) for name, value in model.items()}


def _as_in_json(value: Any) -> Setting:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return _as_in_json(value[0]) if len(value) == 1 else [_as_in_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
