"""The settings of Megatron that work with every zero-bubble schedule, and those that this project handles."""

from __future__ import annotations

from megatron.zero_bubble.mcore.compatibility.setting_rows import Effect, SettingGroup

_RUN = (
    SettingGroup(
        Effect.RUN,
        "sizes and form of the model",
        "A layer's W is the same product whatever its size.",
        """num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups
        kv_channels seq_length max_position_embeddings position_embedding_type swiglu gated_linear_unit
        activation_func normalization add_bias_linear untie_embeddings_and_output_weights vocab_size
        padded_vocab_size make_vocab_size_divisible_by attention_dropout hidden_dropout mtp_num_layers
        mtp_loss_scaling_factor""",
    ),
    SettingGroup(
        Effect.RUN,
        "experts",
        "Experts of megatron-core's own layers are split like other layers.",
        """num_experts num_moe_experts moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff
        moe_token_dispatcher_type moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_layer_freq
        moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_num_groups moe_router_group_topk
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function
        moe_router_enable_expert_bias moe_router_dtype moe_router_bias_update_rate""",
    ),
    SettingGroup(
        Effect.RUN,
        "latent attention",
        "Its projections are linear layers like others.",
        """multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim qk_layernorm
        rotary_scaling_factor mscale mscale_all_dim""",
    ),
    SettingGroup(
        Effect.RUN,
        "Mamba in hybrid models",
        "W is deferred for its projections. Convolution and scan have all gradients in B.",
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads",
    ),
    SettingGroup(
        Effect.RUN,
        "parallelism",
        "The schedule runs on each tensor, context and data rank alike.",
        """tensor_model_parallel_size context_parallel_size expert_model_parallel_size sequence_parallel
        use_distributed_optimizer num_distributed_optimizer_instances overlap_param_gather ddp_bucket_size
        bucket_size distributed_backend""",
    ),
    SettingGroup(
        Effect.RUN,
        "steps and precision",
        "The optimizer's step comes after the last W, or post-validation takes it.",
        """micro_batch_size global_batch_size rampup_batch_size train_iters train_samples lr min_lr decoupled_lr
        decoupled_min_lr weight_decay clip_grad optimizer adam_beta1 adam_beta2 adam_eps sgd_momentum bf16 fp16
        params_dtype pipeline_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
        accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32 grad_reduce_in_bf16 calculate_per_token_loss
        cross_entropy_loss_fusion recompute_activations recompute_modules variable_seq_lengths seed rerun_mode
        inprocess_restart""",
    ),
)
_READ = (
    SettingGroup(
        Effect.READ,
        "attention",
        "It changes the inside of an attention layer. Its linear layers are split like others.",
        """attention_backend use_flash_attn flash_attention_version softmax_scale softmax_type window_size
        window_attn_skip_freq attention_output_gate head_wise_attn_gate qk_l2_norm qk_clip qk_clip_alpha
        qk_clip_threshold log_max_attention_logit no_rope_freq rotary_base rotary_base_per_layer rotary_percent
        rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor rope_type
        use_rotary_position_embeddings add_position_embedding mrope_section mrope_interleaved
        original_max_position_embeddings beta_fast beta_slow yarn_original_max_position_embeddings yarn_beta_fast
        yarn_beta_slow yarn_correction_range_round_to_int relative_attention_num_buckets
        relative_attention_max_distance apply_query_key_layer_scaling attention_softmax_in_fp32
        masked_softmax_fusion mla_down_proj_fusion fused_single_qkv_rope apply_rope_fusion cp_comm_type
        hierarchical_context_parallel_sizes fallback_to_eager_attn add_qkv_bias cp_partition_mode""",
    ),
    SettingGroup(
        Effect.READ,
        "streams of hyper-connections",
        "They are computed within a layer; for what passes between stages see `enable_mhc_connections`.",
        """mhc_num_residual_streams mhc_sinkhorn_iterations mhc_init_gating_factor mhc_recompute_layer_num
        num_residual_streams use_fused_mhc""",
    ),
    SettingGroup(
        Effect.READ,
        "linear attention and state spaces",
        "W is deferred for their linear layers. Their convolutions and scans have all gradients in B.",
        """experimental_attention_variant experimental_attention_variant_loss_scale_func linear_attention_freq
        linear_attention_type linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads linear_cp_mode gdn_pre_gated_delta_rule_fusion gdn_conv_pad_alignment
        gdp_num_householder gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute use_mamba_mem_eff_path
        mamba_training_ssm_states_dtype""",
    ),
    SettingGroup(
        Effect.READ,
        "layers, norms and initial values",
        "It changes the inside of a layer, or its values before the first step.",
        """layernorm_epsilon layernorm_zero_centered_gamma fp32_residual_connection
        apply_residual_connection_post_layernorm memory_efficient_layer_norm persist_layer_norm
        no_persist_layer_norm fused_residual_rmsnorm glu_linear_offset activation_func_clamp_value
        activation_func_fp8_input_store openai_gelu squared_relu quick_geglu onnx_safe bias_activation_fusion
        bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion use_te_activation_func
        use_fused_weighted_squared_relu disable_jit_fuser init_method output_layer_init_method init_method_std
        embedding_init_method embedding_init_method_std init_method_xavier_uniform perform_initialization
        use_cpu_initialization init_model_with_meta_device data_parallel_random_init use_mup mup_width_mult
        mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
        mlp_chunks_for_training clone_scatter_output_in_embedding disable_bf16_reduced_precision_matmul
        deterministic_mode test_mode batch_invariant_mode batch_invariant_backend te_rng_tracker use_te_rng_tracker
        enable_experimental spec enable_gpt_oss""",
    ),
    SettingGroup(
        Effect.READ,
        "multi-token prediction",
        "A layer that a forward uses several times adds up the terms of its W.",
        "mtp_use_repeated_layer mtp_detach_heads mtp_hsm mtp_grad_scale_func",
    ),
    SettingGroup(
        Effect.READ,
        "experts",
        "It changes routing, or how tokens travel between experts. W waits for no token.",
        """moe_grouped_gemm moe_use_legacy_grouped_gemm moe_latent_size moe_shared_expert_gate
        moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size moe_apply_probs_on_input moe_n_hash_layers
        actual_vocab_size moe_router_topk_limited_devices moe_router_padding_for_quantization
        moe_router_padding_for_fp8 moe_router_quantile_balancing_ema moe_router_force_load_balancing
        moe_router_force_biased moe_router_fusion moe_z_loss_coeff moe_grad_scale_func moe_input_jitter_eps
        moe_token_dropping moe_token_drop_policy moe_expert_rank_capacity_factor moe_extended_tp
        expert_tensor_parallel_size moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
        moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_pad_variable_tokens
        moe_permute_fusion moe_permute_fusion_into_hybridep moe_ncclep_static_shape moe_dispatch_fwd_dtype
        moe_combine_bwd_dtype moe_layer_recompute moe_use_upcycling moe_upcycling_granularity""",
    ),
    SettingGroup(
        Effect.READ,
        "fp8, fp4 and other number formats",
        "Transformer Engine computes B and W in the format. Layers that cannot defer W compute it in B.",
        """fp8 fp8_recipe fp8_param fp8_param_gather fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj
        tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe
        fp4_param fp4_param_gather fp4_quantizer_factory keep_fp8_transpose_cache disable_parameter_transpose_cache
        reuse_grad_buf_for_mxfp8_param_ag quant_recipe te_precision_config_file use_kitchen use_kitchen_attention
        kitchen_attention_backend kitchen_config_file kitchen_recipe_number cross_entropy_fusion_impl
        fp16_lm_cross_entropy""",
    ),
    SettingGroup(
        Effect.READ,
        "gradients and their reduction",
        "DDP reduces a bucket when its last W has been added, in megatron-core's own code.",
        """check_for_nan_in_grad check_for_large_grads check_for_nan_in_loss_and_grad check_for_spiky_loss
        ddp_num_buckets num_buckets ddp_pad_buckets_for_high_nccl_busbw pad_buckets_for_high_nccl_busbw
        ddp_reduce_scatter_with_fp32_accumulation reduce_scatter_with_fp32_accumulation ddp_average_in_collective
        average_in_collective ddp_param_name_patterns_for_fp32_local_accumulation
        param_name_patterns_for_fp32_local_accumulation preserve_fp32_weights nccl_ub disable_symmetric_registration
        use_sharp sharp_enabled_group create_all_gather_group disable_grad_buffers_cpu_backup
        disable_param_buffers_cpu_backup overlap_param_gather_with_optimizer_step no_sync_func grad_scale_func
        main_grads_dtype""",
    ),
    SettingGroup(
        Effect.READ,
        "optimizers",
        "The optimizer steps as without a schedule, after the last W.",
        """use_precision_aware_optimizer store_param_remainders main_params_dtype exp_avg_dtype exp_avg_sq_dtype
        decoupled_weight_decay apply_wd_to_qk_layernorm no_weight_decay_cond_type grad_norm_skip_threshold
        muon_momentum muon_split_qkv muon_use_nesterov muon_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_use_syrk muon_extra_scale_factor
        muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency
        soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps
        use_layer_wise_distributed_optimizer use_layer_wise_param_layout offload_optimizer_states
        chunked_optimizer_state_offload optimizer_state_offload_chunk_size_mb optimizer_state_offload_fraction
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params optimizer_cuda_graph
        dump_param_to_param_group_map""",
    ),
    SettingGroup(
        Effect.READ,
        "packed sequences",
        "They reach the layers as they do without a schedule; attention must tell the sequences apart.",
        """sft sft_tokenizer_prompt_format sft_mock_dataset_config_json dataloader_inter_document_masking
        use_varlen_dataset varlen_sbhd_validation varlen_mock_dataset_config_json pad_packed_seq_alignment
        thd_tail_padding_policy thd_max_packed_sequences""",
    ),
    SettingGroup(
        Effect.READ,
        "records of a step",
        "Hooks of modules record what F and B compute. What the gradients of weights are is read after the last W.",
        """save_activations_interval save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval
        save_params_interval log_params_norm log_num_zeros_in_grad moe_per_layer_logging log_moe_overload_factor
        moe_routing_trace_path moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights logits_save_top_k logits_save_top_p
        logits_save_top_p_min_k logits_save_dir logits_save_dtype logits_load_dir logits_load_decode_threads
        logits_load_prefetch_factor logits_load_msc_prefetch_depth logits_load_kd_loss_alpha
        logits_load_ignore_errors error_injection_rate error_injection_type
        check_weight_hash_across_dp_replicas_interval""",
    ),
)
_HANDLED = (
    SettingGroup(
        Effect.HANDLED,
        "stages and chunks",
        "The schedule's placement needs them. `--zero-bubble` chooses what they leave open ([layouts](layouts.md)).",
        """pipeline_model_parallel_size virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split mtp_standalone
        microbatch_group_size_per_vp_stage""",
    ),
    SettingGroup(
        Effect.HANDLED,
        "layers that come from elsewhere",
        "Megatron's own layout stays, and a line says so.",
        """heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json per_block_parameters
        heterogeneous_block_specs hetereogenous_dist_checkpoint yaml_cfg is_hybrid_model hybrid_attention_ratio
        hybrid_mlp_ratio""",
    ),
    SettingGroup(
        Effect.HANDLED,
        "patterns of layers",
        "The `|`s of a pattern are the layout; where it has none they are chosen or even "
        "([hybrid models](megatron_lm.md#hybrid-models)).",
        "hybrid_layer_pattern hybrid_override_pattern mtp_hybrid_override_pattern",
    ),
    SettingGroup(
        Effect.HANDLED,
        "messages between experts",
        "A plan runs a forward and a backward as one, in which they are hidden ([experts](experts.md)).",
        "overlap_moe_expert_parallel_comm",
    ),
    SettingGroup(
        Effect.HANDLED,
        "streams between stages",
        "Messages are wider than the hidden size, so each tells its shape, as with `variable_seq_lengths`.",
        "enable_mhc_connections enable_hyper_connections",
    ),
    SettingGroup(
        Effect.HANDLED,
        "messages between stages",
        "Messages have channels of their own, and the schedule says when each is sent ([GPUs and NCCL](gpu.md)).",
        """overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p overlap_p2p_comm_warmup_flush
        pipeline_model_parallel_comm_backend scatter_gather_tensors_in_pipeline deallocate_pipeline_outputs
        high_priority_stream_groups distributed_timeout_minutes distributed_timeout_seconds_after_init""",
    ),
    SettingGroup(
        Effect.HANDLED,
        "recomputation",
        "Recomputation of whole layers becomes an operation of the schedule ([recomputation](recomputation.md)); "
        "`--zero-bubble-recompute planned` chooses what is recomputed, and takes none of these.",
        """recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
        checkpoint_activations""",
    ),
    SettingGroup(
        Effect.HANDLED,
        "weight gradients",
        "W adds a gradient as the setting says, and then calls DDP's own hook. A layer whose output has another type "
        "keeps its W in B.",
        "gradient_accumulation_fusion transformer_impl logit_dtype",
    ),
    SettingGroup(
        Effect.HANDLED,
        "the end of a step",
        "Gradients are reduced, and parameters gathered, when the schedule needs it; DDP's hooks start both.",
        """overlap_grad_reduce align_grad_reduce align_param_gather grad_sync_func param_sync_func
        finalize_model_grads_func""",
    ),
    SettingGroup(
        Effect.HANDLED,
        "times",
        "The schedule runs Megatron's timers; level 2 is refused on a GPU, because it waits for the device in a step.",
        "timers barrier_with_L1_time timing_log_level",
    ),
)
WORKING = (*_RUN, *_READ, *_HANDLED)
