"""The settings of Megatron that are refused: with every zero-bubble schedule, with a feature, or for some values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.mcore.compatibility.setting_rows import Feature, Refusal, is_on


def _with(features: list[Feature], *rows: Refusal) -> Iterator[Refusal]:
    """Yield rows that are refused with these features only."""
    return (replace(row, features=tuple(features)) for row in rows)


def _is_given(value: Any, settings: object) -> bool:
    return value is not None


def _exceeds(name: str) -> Any:
    """Whether weights are divided into more shards than there are tensor ranks, whose number `name` is."""
    return lambda value, settings: value is not None and value > (getattr(settings, name, None) or 1)


def _has_biases(value: Any, settings: Any) -> bool:
    return is_on(value, settings) and getattr(settings, "add_bias_linear", True)


def _remembers_forwards(value: Any, settings: Any) -> bool:
    return is_on(value, settings) and getattr(settings, "fp8_recipe", None) in (None, "delayed")


def _has_local_attention(value: Any, settings: Any) -> bool:
    return is_on(value, settings) and (
        getattr(settings, "transformer_impl", None) == "local" and not getattr(settings, "spec", None)
    )


WITH_EVERY_SCHEDULE = (
    Refusal(
        "hybrid_context_parallel dynamic_context_parallel sequence_packing_scheduler",
        "it brings its own pipeline schedule",
    ),
    Refusal("perform_rl_step", "its rollouts need megatron-core's own schedule"),
    Refusal("freeze_all_layers", "it runs forwards only, so that nothing is left to schedule"),
    Refusal(
        "delay_wgrad_compute defer_embedding_wgrad_compute",
        "zero bubble defers W too",
        "the schedule has the same gain without it",
    ),
    Refusal("overlap_dispatch_backward_with_experts_wgrad", "megatron-core then runs the W of experts itself"),
    Refusal(
        "use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp dense_grouped_gemm "
        "use_grouped_gemm_for_shared_expert",
        "Transformer Engine's fused operations compute W outside of the layers that defer it",
    ),
    Refusal(
        "moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias",
        "it is not known how Transformer Engine defers the W of experts that are one tensor",
    ),
    Refusal("tp_comm_overlap", "Transformer Engine cannot defer W together with userbuffers"),
    Refusal("enable_autocast", "backward runs under autocast, but W runs later, outside of it"),
    Refusal(
        "fine_grained_activation_offloading cpu_offloading cpu_offloading_num_layers",
        "W may need a tensor that it has released after B",
        "recomputation saves memory too",
    ),
    Refusal(
        "moe_shared_expert_overlap",
        "the shared expert has a stream of its own, which may use memory again that W still reads",
    ),
    Refusal("moe_ncclep_zero_copy moe_ncclep_use_symm_mem", "its buffers are used again before W has read them"),
    Refusal("moe_paged_stash", "it records the order of operations of megatron-core's own schedule"),
    Refusal("moe_enable_routing_replay", "it replays routes in the order of megatron-core's own schedule"),
    Refusal(
        "cuda_graph_impl enable_cuda_graph external_cuda_graph",
        "a graph records B and W together, or the order of operations of megatron-core's own schedule",
    ),
    Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        "it says which microbatches recompute by their place in megatron-core's own schedule",
        "--zero-bubble-recompute planned chooses the microbatches",
        when=_is_given,
    ),
    Refusal(
        "gtp_weight_remat_size expert_gtp_weight_remat_size",
        "it shards weights, but W accumulates whole gradients",
        when=lambda value, settings: (value or 1) > 1,
    ),
    Refusal(
        "tensor_parallel_num_weight_shards",
        "it shards weights, but W accumulates whole gradients",
        "it works with as many shards as tensor ranks",
        when=_exceeds("tensor_model_parallel_size"),
    ),
    Refusal(
        "expert_tensor_parallel_num_weight_shards",
        "it shards the weights of experts, but W accumulates whole gradients",
        "it works with as many shards as tensor ranks of experts",
        when=_exceeds("expert_tensor_parallel_size"),
    ),
    Refusal(
        "use_megatron_fsdp use_custom_fsdp",
        "it shards gradients, but W accumulates whole ones",
        "--use-distributed-optimizer shards the optimizer's states",
    ),
    Refusal("use_torch_fsdp2", "Megatron-LM refuses it with pipelines", "pretrain_gpt.py of this project runs it"),
    Refusal("use_legacy_models", "its layers are not megatron-core's"),
    Refusal(
        "modelopt_enabled export_kd_teacher_load qad_train_target freeze_base_for_mtp",
        "ModelOpt computes with other weights than the parameters, and sends a teacher's messages too",
    ),
    Refusal("fake_process_group", "its messages carry nothing, so that no schedule can be measured"),
    Refusal(
        "experimental_attention_variant",
        "it multiplies with weights outside of their layers, so that W would not have their gradients",
        condition="`dsa`, `dsv4_hybrid`",
        when=lambda value, settings: value in ("dsa", "dsv4_hybrid"),
    ),
    Refusal(
        "fp8 fp4",
        "Transformer Engine loses the gradients of biases if W is deferred",
        "it works without biases (--disable-bias-linear)",
        condition="with biases",
        when=_has_biases,
    ),
    Refusal(
        "sft",
        "it packs sequences, which megatron-core's local attention cannot tell apart",
        "give --transformer-impl transformer_engine, which needs a GPU, or --spec with an attention that can",
        condition="with local attention",
        when=_has_local_attention,
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
        Refusal(
            "log_max_attention_logit save_activations_interval save_tokens_per_expert_interval moe_routing_trace_path",
            "it records forwards that may have to run again",
        ),
        Refusal(
            "timing_log_level",
            "its timers make every step wait for all ranks",
            "use 0 or 1",
            condition="2",
            when=lambda value, settings: (value or 0) > 1,
        ),
        Refusal("mtp_detach_heads", "it clips the layers of --mtp-num-layers by a separate norm"),
        Refusal("use_precision_aware_optimizer", "it keeps gradients and parameters in an unsupported form"),
        Refusal("optimizer_cuda_graph", "its graph contains clipping and step, which post-validation runs separately"),
        Refusal(
            "grad_norm_skip_threshold",
            "the norm is known only after the step",
            condition="finite",
            when=lambda value, settings: value is not None and math.isfinite(value),
        ),
        Refusal("use_layer_wise_distributed_optimizer", "each replica would undo the step of its own layers only"),
        Refusal(
            "optimizer",
            "each replica would undo the step of its own layers only",
            "use muon",
            condition="`dist_muon`",
            when=lambda value, settings: str(value).startswith("dist_"),
        ),
        Refusal(
            "reuse_grad_buf_for_mxfp8_param_ag", "it overwrites the gradients with which a wrong step is taken again"
        ),
        Refusal(
            "overlap_param_gather_with_optimizer_step",
            "parameters are sent to the replicas before their step is validated",
            "--overlap-param-gather alone works",
        ),
        Refusal(
            "fp8",
            "its scaling remembers the forwards that have to run again",
            "use another --fp8-recipe",
            condition="with the recipe `delayed`",
            when=_remembers_forwards,
        ),
        Refusal("moe_expert_rank_capacity_factor", "both run steps again", when=_is_given),
        Refusal("error_injection_rate", "both run steps again"),
    ),
    *_with(
        [Feature.POST_VALIDATION, Feature.HIERARCHICAL_SGD],
        Refusal(
            "optimizer_cpu_offload offload_optimizer_states chunked_optimizer_state_offload",
            "it keeps the optimizer's parameters and states on the host",
        ),
    ),
    *_with(
        [Feature.POST_VALIDATION, Feature.LAYER_SEEDS],
        Refusal(
            "rerun_mode",
            "it runs every step twice, which counts as two",
            "use validate_results or disabled",
            condition="`report_stats`",
            when=lambda value, settings: value == "report_stats",
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
            "each replica keeps a shard of the others' parameters, so none can step alone",
            "leave it out",
        ),
        Refusal(
            "expert_model_parallel_size",
            "replicas share experts, so none can step alone",
            "use 1",
            condition="above 1",
            when=lambda value, settings: (value or 1) > 1,
        ),
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
    ),
    *_with(
        [Feature.PLANNED_RECOMPUTATION],
        Refusal(
            "fp8 fp4",
            "only Transformer Engine's backward can recompute",
            "give --recompute-granularity, and leave out --zero-bubble-recompute",
        ),
    ),
    *_with(
        [Feature.OFFLOAD],
        Refusal("variable_seq_lengths", "the order of microbatches is planned anew in every step"),
        Refusal(
            "transformer_impl",
            "copying the tensors that Transformer Engine keeps for W has not been tested",
            "use local, or --zero-bubble-recompute planned, which saves memory with Transformer Engine",
            condition="`transformer_engine`",
            when=lambda value, settings: value == "transformer_engine",
        ),
        Refusal("fp8 fp4", "tensors of these types are not copied to the host", "leave it out"),
        Refusal(
            "overlap_moe_expert_parallel_comm",
            "a forward that runs in a pair is not copied to the host",
            "leave one of them out",
        ),
    ),
    *_with(
        [Feature.V_PLACEMENT],
        Refusal(
            "num_layers_per_virtual_pipeline_stage",
            "it asks for megatron-core's interleaved placement, not a V",
            "use --num-virtual-stages-per-pipeline-rank 2",
        ),
        Refusal(
            "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json",
            "in a V, stages take their layers in another order",
            "use a linear schedule",
        ),
    ),
)
REFUSALS = (*WITH_EVERY_SCHEDULE, *WITH_FEATURES)
