"""Lists Megatron's settings that are refused, by every zero-bubble schedule or only by a feature of this project."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple


class Feature(Enum):
    """A feature of this project, named by the feature's flag. A feature can refuse settings of Megatron."""

    POST_VALIDATION = "--zero-bubble-post-validation"
    SCRIPT_POST_VALIDATION = "--zero-bubble-post-validation under the launcher"
    HIERARCHICAL_SGD = "--hierarchical-sgd"
    VOCABULARY_SHARDS = "--zero-bubble-vocabulary-parallel on"
    PLANNED_RECOMPUTATION = "--zero-bubble-recompute planned"
    OFFLOAD = "--zero-bubble-offload auto"
    V_PLACEMENT = "a V placement (zb-v, v-half, v-min)"


class Condition(NamedTuple):
    """Condition under which a setting is refused, given its value and an object with all settings as attributes."""

    holds: Callable[[Any, Any], bool]
    words: str = ""
    """The condition in words: the refused values, or the other settings that cause the refusal. Empty if every value
    that switches the setting on is refused, or if `Refusal.instead` describes the allowed values."""


def _is_on(value: Any, settings: object) -> bool:
    return bool(value) and value != "none"


def _above(limit: int, words: str = "") -> Condition:
    return Condition(lambda value, settings: (value or limit) > limit, words)


def _one_of(*values: str) -> Condition:
    return Condition(lambda value, settings: value in values, ", ".join(f"`{value}`" for value in values))


def _more_than(name: str) -> Condition:
    """Return the condition that a setting is larger than the setting `name`, for example more shards than ranks."""
    return Condition(lambda value, settings: value is not None and value > (getattr(settings, name, None) or 1))


def _on_and(words: str, holds: Callable[[Any], bool]) -> Condition:
    return Condition(lambda value, settings: _is_on(value, settings) and holds(settings), words)


_ON = Condition(_is_on)
_GIVEN = Condition(lambda value, settings: value is not None)
_FINITE = Condition(lambda value, settings: value is not None and math.isfinite(value), "finite")
_DISTRIBUTED = Condition(lambda value, settings: str(value).startswith("dist_"), "`dist_muon`")
_MLP_WITH_BIASES = _on_and(
    "`mlp` with biases",
    lambda args: args.recompute_granularity == "selective" and "mlp" in args.recompute_modules and args.add_bias_linear,
)
_TIMED = Condition(
    lambda value, args: value == 2 or (value == 1 and getattr(args, "barrier_with_L1_time", False)),
    "2, or 1 without `--no-barrier-with-level-1-timing`",
)
_SUMMED = Condition(
    lambda value, settings: any(kind in str(value) for kind in ("global_aux_loss", "quantile_balancing")),
    "`global_aux_loss` or `quantile_balancing`",
)
_DELAYED = _on_and("with the recipe `delayed`", lambda args: getattr(args, "fp8_recipe", None) in (None, "delayed"))
_WITH_LOCAL_ATTENTION = _on_and(
    "with local attention",
    lambda args: getattr(args, "transformer_impl", None) == "local" and not getattr(args, "spec", None),
)

RECORDING = (
    "save_activations_interval save_tokens_per_expert_interval moe_routing_trace_path logits_save_dir logits_load_dir"
)
"""Arguments of Megatron-LM that record or count every forward, separated by white space."""


@dataclass(frozen=True)
class Refusal:
    """Settings that are refused for the same reason.

    Attributes:
        names: the names of configuration fields and of Megatron-LM's arguments, separated by white space.
        reason: why the settings are refused, as the text after the colon of the error message.
        instead: the remedy, as the text after the semicolon of the error message; empty if the message names no remedy.
        when: the condition under which the settings are refused; this condition may depend on the setting's value and
            on other settings.
        features: features with which the settings are refused; empty if every zero-bubble schedule refuses them.
    """

    names: str
    reason: str
    instead: str = ""
    when: Condition = _ON
    features: tuple[Feature, ...] = ()


def _with(features: list[Feature], *rows: Refusal) -> Iterator[Refusal]:
    """Yield a copy of each refusal in `rows`; the copies apply only to the given `features`."""
    return (replace(row, features=tuple(features)) for row in rows)


WITH_EVERY_SCHEDULE = (
    Refusal(
        "hybrid_context_parallel dynamic_context_parallel sequence_packing_scheduler",
        "it brings its own pipeline schedule",
    ),
    Refusal("perform_rl_step", "its rollouts need megatron-core's own schedule"),
    Refusal("freeze_all_layers", "it runs only forwards, so that there is no backward to schedule"),
    Refusal(
        "delay_wgrad_compute defer_embedding_wgrad_compute",
        "zero-bubble schedules defer W themselves",
        "leave it out; the gain is the same",
    ),
    Refusal("overlap_dispatch_backward_with_experts_wgrad", "megatron-core then runs the W of experts itself"),
    Refusal(
        "use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp dense_grouped_gemm "
        "use_grouped_gemm_for_shared_expert",
        "Transformer Engine's fused operations compute W outside of the layers that defer W",
    ),
    Refusal(
        "moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias",
        "deferring W of experts whose weights are one tensor has not been tested",
    ),
    Refusal("tp_comm_overlap", "Transformer Engine cannot defer W together with userbuffers"),
    Refusal("enable_autocast", "backward runs under autocast, but W runs later, outside of autocast"),
    Refusal(
        "fine_grained_activation_offloading cpu_offloading cpu_offloading_num_layers",
        "W may need a tensor that was released after B",
        "recomputation saves memory too",
    ),
    Refusal("moe_shared_expert_overlap", "the shared expert's own stream may overwrite memory that W still reads"),
    Refusal("moe_ncclep_zero_copy moe_ncclep_use_symm_mem", "its buffers are overwritten before W has read them"),
    Refusal("inprocess_restart", "connections of the interrupted training would remain open"),
    Refusal("ep_overlap_early_attn_memory_release moe_paged_stash", "it needs megatron-core's own order of operations"),
    Refusal("moe_enable_routing_replay enable_routing_replay", "it replays routes in megatron-core's own order"),
    Refusal(
        "cuda_graph_impl enable_cuda_graph external_cuda_graph",
        "a graph records B and W together, or the order of operations of megatron-core's own schedule",
    ),
    Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        "it selects the recomputed microbatches by their place in megatron-core's own schedule",
        "--zero-bubble-recompute planned chooses the microbatches",
        when=_GIVEN,
    ),
    Refusal(
        *("recompute_modules", "megatron-core hangs with biases", "leave mlp out, or add --disable-bias-linear"),
        when=_MLP_WITH_BIASES,
    ),
    Refusal(
        "gtp_weight_remat_size expert_gtp_weight_remat_size",
        "it shards weights, but W accumulates whole gradients",
        when=_above(1),
    ),
    Refusal(
        "tensor_parallel_num_weight_shards",
        "it shards weights, but W accumulates whole gradients",
        "it works with as many shards as tensor ranks",
        when=_more_than("tensor_model_parallel_size"),
    ),
    Refusal(
        "expert_tensor_parallel_num_weight_shards",
        "it shards the weights of experts, but W accumulates whole gradients",
        "it works with as many shards as tensor ranks of experts",
        when=_more_than("expert_tensor_parallel_size"),
    ),
    Refusal(
        "use_megatron_fsdp use_custom_fsdp",
        "it shards gradients, but W accumulates whole gradients",
        "--use-distributed-optimizer shards the optimizer's states",
    ),
    Refusal("use_torch_fsdp2", "Megatron-LM refuses it with pipelines", "pretrain_gpt.py of this project runs it"),
    Refusal("use_legacy_models", "its layers are not megatron-core's"),
    Refusal(
        "modelopt_enabled export_kd_teacher_load qad_train_target freeze_base_for_mtp",
        "ModelOpt computes with other weights than the parameters, and sends a teacher's messages too",
    ),
    Refusal("fake_process_group", "it sends no messages, so that no schedule can be measured"),
    Refusal(
        "experimental_attention_variant",
        "it multiplies with weights outside of linear layers, so that W could not compute their gradients",
        when=_one_of("dsa", "dsv4_hybrid"),
    ),
    Refusal(
        "sft dataloader_inter_document_masking",
        "it packs sequences, which megatron-core's local attention cannot tell apart",
        "give --transformer-impl transformer_engine, which needs a GPU, or --spec with an attention that can",
        when=_WITH_LOCAL_ATTENTION,
    ),
)
WITH_FEATURES = (
    *_with(
        [Feature.SCRIPT_POST_VALIDATION],
        Refusal(
            "fp16 loss_scale",
            "the script gets the result of a step before it is known whether the step is skipped",
            "use --bf16",
        ),
    ),
    *_with(
        [Feature.POST_VALIDATION],
        Refusal("log_params_norm", "it reads the parameters before a step is validated"),
        Refusal("save_params_interval", "it saves the parameters before their step is validated"),
        Refusal("log_num_zeros_in_grad", "the zeros are counted over all ranks before the step"),
        Refusal("qk_clip", "it changes parameters before their step is validated"),
        Refusal(f"log_max_attention_logit {RECORDING}", "it records forwards that may have to run again"),
        Refusal("timing_log_level", "its timers make every step wait for all ranks", "use 0", when=_TIMED),
        Refusal("mtp_detach_heads", "it clips the layers of --mtp-num-layers by a separate norm"),
        Refusal("use_precision_aware_optimizer", "it keeps gradients and parameters in an unsupported form"),
        Refusal("optimizer_cuda_graph", "its graph contains clipping and step, which post-validation runs separately"),
        Refusal("grad_norm_skip_threshold", "the norm is known only after the step", when=_FINITE),
        Refusal(
            "reuse_grad_buf_for_mxfp8_param_ag", "it overwrites the gradients with which a wrong step is taken again"
        ),
        Refusal(
            "overlap_param_gather_with_optimizer_step",
            "parameters are sent to the replicas before their step is validated",
            "--overlap-param-gather alone works",
        ),
        Refusal("fp8", "its scaling remembers forwards that run again", "use another --fp8-recipe", when=_DELAYED),
        Refusal("moe_expert_rank_capacity_factor", "it runs steps again, and so does post-validation", when=_GIVEN),
        Refusal("error_injection_rate", "it runs steps again, and so does post-validation"),
        Refusal("rerun_mode", "it takes every step twice", "use disabled", when=_one_of("report_stats")),
    ),
    *_with(
        [Feature.POST_VALIDATION, Feature.HIERARCHICAL_SGD],
        Refusal("use_layer_wise_distributed_optimizer", "each replica steps only its own layers"),
        Refusal("optimizer", "each replica steps only its own layers", "use muon", when=_DISTRIBUTED),
        Refusal(
            "optimizer_cpu_offload offload_optimizer_states chunked_optimizer_state_offload",
            "it keeps the optimizer's parameters and states on the host",
        ),
    ),
    *_with(
        [Feature.HIERARCHICAL_SGD],
        Refusal(
            "check_weight_hash_across_dp_replicas_interval",
            "replicas have different weights between two averagings",
            "leave it out",
        ),
        Refusal(
            "use_distributed_optimizer",
            "each replica keeps a shard of the others' parameters, so no replica can step alone",
            "leave it out",
        ),
        Refusal(
            "expert_model_parallel_size",
            "replicas share experts, so no replica can step alone",
            "use 1",
            when=_above(1, "above 1"),
        ),
        Refusal("optimizer_cuda_graph", "its graph repeats the optimizer's step without the averaging of replicas"),
        Refusal("fp16", "every replica would have a loss scale of its own", "use --bf16"),
        Refusal(
            "calculate_per_token_loss", "the number of tokens is summed over replicas in every step", "leave it out"
        ),
    ),
    *_with(
        [Feature.VOCABULARY_SHARDS],
        Refusal("mtp_num_layers", "its losses need the whole output layer on one rank", "leave it out"),
        Refusal("variable_seq_lengths", "the collectives need one shape on all ranks"),
        Refusal("logit_dtype", "the shards compute logits in the type of the model"),
        Refusal("fp8_output_proj", "the shards have an output layer of their own"),
        Refusal("logits_save_dir logits_load_dir", "no rank has all logits of a token"),
        Refusal("log_straggler", "its timers end before the model runs"),
    ),
    *_with(
        [Feature.PLANNED_RECOMPUTATION],
        Refusal(
            "fp8 fp4",
            "only Transformer Engine's backward can recompute",
            "give --recompute-granularity, and leave out --zero-bubble-recompute",
        ),
        Refusal(
            "moe_router_load_balancing_type",
            "it sums over microbatches in their order, but a recomputation may follow a later forward",
            "give --recompute-granularity full, or aux_loss",
            when=_SUMMED,
        ),
    ),
    *_with(
        [Feature.OFFLOAD],
        Refusal("variable_seq_lengths", "the order of microbatches is planned anew in every step"),
        Refusal(
            "transformer_impl",
            "copying the tensors that Transformer Engine keeps for W has not been tested",
            "use local, or --zero-bubble-recompute planned, which saves memory with Transformer Engine",
            when=_one_of("transformer_engine"),
        ),
        Refusal("fp8 fp4", "tensors of these types are not copied to the host", "leave it out"),
        Refusal(
            *("recompute_granularity", "nothing that is recomputed is copied", "use --zero-bubble-recompute planned"),
            when=_one_of("full"),
        ),
        Refusal("overlap_moe_expert_parallel_comm", "a forward in a pair is not copied to the host", "choose one"),
    ),
    *_with(
        [Feature.V_PLACEMENT],
        Refusal(
            "num_layers_per_virtual_pipeline_stage",
            "it asks for megatron-core's interleaved placement, not a V",
            "use --num-virtual-stages-per-pipeline-rank 2",
        ),
        Refusal(
            "iterations_to_skip", "Megatron-LM skips iterations of one model chunk a rank", "use a linear schedule"
        ),
        Refusal(
            "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json",
            "in a V, stages take their layers in another order",
            "use a linear schedule",
        ),
        Refusal("logits_save_dir logits_load_dir", "in a V, the last rank has no logits", "use a linear schedule"),
    ),
)
REFUSALS = (*WITH_EVERY_SCHEDULE, *WITH_FEATURES)
