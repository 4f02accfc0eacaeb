"""The settings of Megatron that say nothing about forward, backward and the optimizer's step."""

from __future__ import annotations

from megatron.zero_bubble.mcore.compatibility.setting_rows import Effect, SettingGroup

_AROUND_A_STEP = "Megatron reads it before, between or after steps."


def _without_effect(title: str, names: str, reason: str = _AROUND_A_STEP) -> SettingGroup:
    return SettingGroup(Effect.NONE, title, reason, names)


WITHOUT_EFFECT = (
    _without_effect(
        "rates and lengths of a training",
        """lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples
        lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay weight_decay_incr_style
        step_batch_size_schedule decrease_batch_size_if_needed iterations_to_skip exit_interval
        exit_duration_in_mins exit_signal exit_signal_handler exit_signal_handler_for_dataloader
        exit_signal_handler_for_training train_sync_interval empty_unused_memory_level manual_gc manual_gc_interval
        manual_gc_eval skip_train eval_iters eval_interval start_eval_at_iter eval_global_batch_size
        eval_micro_batch_size full_validation multiple_validation_sets validation_set_names gpu_sniff_test_interval
        result_rejected_tracker_filename""",
    ),
    _without_effect(
        "data and tokenizers",
        """data_path split train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path
        per_dataset_sequences_path data_cache_path mock_data phase_transition_iterations dataloader_type
        dataloader_fast_cache_load dataloader_defer_npy_index_mmap mmap_bin_files num_workers
        num_dataset_builder_threads object_storage_cache_path mid_level_dataset_surplus allow_ambiguous_pad_tokens
        reset_position_ids reset_attention_mask eod_mask_loss create_attention_mask_in_dataloader fim_data fim_rate
        fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token
        fim_suffix_token fim_pad_token fim_eod_token enable_msc disable_msc_deprecated vocab_file merge_file
        vocab_extra_ids tokenizer_type tokenizer_model tokenizer_metadata tokenizer_special_tokens legacy_tokenizer
        tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens tokenizer_sentencepiece_legacy
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_use_fast tokenizer_hf_no_use_fast
        tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens trust_remote_code pad_vocab_size
        metadata_path special_tokens null_tokenizer_eod_id null_tokenizer_pad_id chat_template use_gigatoken""",
    ),
    _without_effect(
        "checkpoints",
        """save save_interval save_retain_interval load load_main_params_from_ckpt finetune pretrained_checkpoint
        ckpt_step exit_on_missing_checkpoint non_persistent_save_interval non_persistent_ckpt_type
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo
        use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args ckpt_format
        auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format
        ckpt_fully_parallel_save ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_load_per_rank_objects ckpt_fully_parallel_save_process_group
        ckpt_fully_parallel_load_process_group ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity
        ckpt_pg_tensors_cache_path ckpt_pg_tensors_cache_create ckpt_drop_redundant_extra_state
        override_ckpt_iteration stream_ckpt_dequant save_tokenizer_assets async_save async_strategy
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm use_persistent_ckpt_worker
        verify_integrity strict_fsdp_dtensor_load dist_ckpt_strictness dist_ckpt_workers
        dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
        replication replication_jump replication_factor no_save_optim no_save_rng no_load_optim no_load_rng
        use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated""",
        "Megatron's own script saves and loads, between steps. Post-validation completes a step before it is saved.",
    ),
    _without_effect(
        "output, profiles and watching a job",
        """log_interval log_throughput log_progress timing_log_option tensorboard_dir tensorboard_log_interval
        tensorboard_queue_size log_timers_to_tensorboard log_loss_scale_to_tensorboard
        log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_memory_interval log_device_memory_used
        log_world_size_to_tensorboard wandb_project wandb_exp_name wandb_save_dir wandb_entity logging_level
        log_energy otel_enabled otel_service_name otel_span_groups profile profile_step_start profile_step_end
        use_pytorch_profiler pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra profile_ranks record_memory_history memory_snapshot_path record_shapes
        nvtx_ranges config_logger_dir log_straggler straggler_ctrlr_port straggler_minmax_count
        disable_straggler_on_startup run_workload_inspector_server enable_one_logger one_logger_project
        one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version enable_ft_package calc_ft_timeouts
        ft_num_warmup_iters adlr_autoresume adlr_autoresume_interval flight_recorder_dump_path
        flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec inprocess_max_iterations
        inprocess_monitor_thread_interval inprocess_monitor_process_interval inprocess_progress_watchdog_interval
        inprocess_heartbeat_interval inprocess_soft_timeout inprocess_hard_timeout inprocess_heartbeat_timeout
        inprocess_barrier_timeout inprocess_completion_timeout inprocess_last_call_wait
        inprocess_termination_grace_time inprocess_granularity inprocess_active_world_size
        inprocess_empty_cuda_cache fault_injector_ranks fault_injector_num_ranks fault_injector_fault_types
        fault_injector_fault_probabilities fault_injector_fault_delay fault_injector_delay_start_iteration
        fault_injector_mtti_seconds fault_injector_offset_seconds fault_injector_seed""",
    ),
    _without_effect(
        "process groups",
        """local_rank lazy_mpu_init use_tp_pp_dp_mapping use_gloo_process_groups enable_gloo_process_groups
        nccl_communicator_config_path""",
        "The ranks of a pipeline are found in megatron-core's groups, whatever made them.",
    ),
    _without_effect(
        "parts of refused settings",
        """ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream wgrad_deferral_limit
        max_seqlen_per_dp_cp_rank autocast_dtype tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
        tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
        tp_comm_overlap_cfg async_tensor_model_parallel_allreduce cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers offload_modules
        min_offloaded_tensor_size fine_grained_offloading_max_inflight_offloads delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope cuda_graph_scope_deprecated
        cuda_graph_modules data_parallel_sharding_strategy outer_dp_sharding_strategy gradient_reduce_div_fusion
        suggested_communication_unit_size fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
        fsdp_manual_registration fsdp_all_gather_in_start_param_sync enable_full_sharding_in_hsdp
        megatron_fsdp_version megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        torch_fsdp2_reshard_after_forward gtp_remat_opt_in_modules gtp_remat_reduce_scatter_with_fp32_accumulation
        gtp_remat_nccl_ub gtp_expert_remat_nccl_ub
        min_dynamic_context_parallel_size csa_window_size csa_compress_ratios csa_compress_rotary_base
        csa_dense_mode apply_dsa_kernel_fusion o_groups o_lora_rank cuda_graph_dynamic_microbatches
        megatron_fsdp_cache_param_bucket_views megatron_fsdp_prefetch_recompute_forward_weights dsa_indexer_n_heads
        dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        dsa_kernel_backend grpo_prompts_per_step grpo_group_size grpo_iterations grpo_clamp_eps_lower
        grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward
        langrl_inference_server_type langrl_inference_server_conversation_template langrl_external_server
        langrl_env_config refit_method rl_prompts_per_eval rl_default_temperature rl_default_top_p rl_default_top_k
        rl_offload_optimizer_during_inference rl_offload_kv_cache_during_training rl_remove_kv_cache_during_training
        rl_reset_cuda_graphs rl_partial_rollouts rl_inference_logprobs_is_correction
        rl_importance_sampling_truncation_coef rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin
        rl_sequence_packing_algo rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
        rl_offload_inference_model_weights_when_idle rl_verify_model_weights_swap rl_parallel_generation_tasks
        rl_skip_bos_token rl_num_parallel_generations rl_num_parallel_generation_batches rl_generation_batch_size
        rl_kv_cache_management_mode rl_persist_cuda_graphs rl_inference_parsers rl_generation_lag
        rl_submission_granularity rl_consumption_granularity rl_profile rl_profile_dir rl_max_inflight_requests
        rl_durable_rollout_bank rl_rollout_bank_dir rl_rollout_bank_max_bytes export_kd_teacher_model_config
        export_kd_teacher_ckpt_format export_kd_cfg""",
        "Without the refused setting nothing reads it.",
    ),
    _without_effect(
        "inference",
        """flash_decode inference_rng_tracker inference_sampling_seed symmetric_ar_type use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents inference_cuda_graph_scope
        nccl_all_reduce_for_prefill moe_pad_experts_for_cuda_graph_inference inference_disable_triton_nvls_kernels
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings bert_embedder_type
        use_legacy_static_engine inference_max_batch_size inference_max_requests inference_max_seq_length
        inference_dynamic_batching inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_paused_buffer_size_gb inference_dynamic_batching_block_size
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events inference_dynamic_batching_unified_memory_level
        inference_dynamic_batching_cuda_graph_max_tokens inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_enable_prefix_caching inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_sampling_backend inference_dynamic_batching_async_sched_mode
        inference_dynamic_batching_logprobs_mode inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_disable_ep_consensus inference_shards inference_use_synchronous_zmq_collectives
        inference_logging_step_interval inference_wandb_logging inference_coordinator_port
        inference_text_gen_server_logging decode_only_cuda_graphs disable_chunked_prefill enable_chunked_prefill
        num_speculative_tokens offset_sampling_seed_by_dp_rank mamba_inference_conv_states_dtype
        mamba_inference_ssm_states_dtype""",
        "Training does not read it.",
    ),
    _without_effect(
        "other programs of Megatron-LM",
        """encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length sample_rate mask_prob
        short_seq_prob bert_binary_head ict_head_size biencoder_projection_dim biencoder_shared_query_context_model
        ict_load bert_load titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path
        retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path indexer_batch_size
        indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction data_per_class_fraction
        data_sharding head_lr_mult vision_pretraining vision_pretraining_type vision_backbone_type
        swin_backbone_type mask_type mask_factor iter_per_epoch dino_local_img_size dino_local_crops_number
        dino_head_hidden_size dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer
        dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs export_model_type
        export_legacy_megatron export_te_mcore_model export_force_local_attention export_kv_cache_quant
        export_real_quant_cfg export_quant_cfg finetune_hf_dataset finetune_data_split finetune_data_files
        export_qk_l2_norm export_moe_apply_probs_on_input export_offline_model export_default_te_spec""",
        "Scripts that train a GPT or a hybrid model do not read it. The launcher is not tested with other models.",
    ),
    _without_effect(
        "gone from Megatron-LM",
        "batch_size warmup model_parallel_size deprecated_use_mcore_models",
        "Megatron-LM refuses or ignores it.",
    ),
)
CLASSES_WITHOUT_EFFECT = (
    "megatron.core.datasets.",
    "megatron.core.tokenizers.",
    "megatron.core.dist_checkpointing.",
    "megatron.core.export.",
    "megatron.core.inference.",
    "megatron.core.fault_injector.",
    "megatron.core.models.audio.",
    "megatron.core.models.mimo.",
    "megatron.core.distributed.fsdp.",
    "megatron.core.distributed.nonuniform_tp.",
    "megatron.core.distributed.torch_fully_sharded_data_parallel_config.",
    "megatron.core.tensor_parallel.generalized_tensor_parallelism.",
    "megatron.core.transformer.heterogeneous.heterogeneous_config.AttentionConfig",
    "megatron.core.transformer.heterogeneous.heterogeneous_config.MLPConfig",
    "megatron.core.transformer.heterogeneous.heterogeneous_config.TransformerBlockConfig",
    "megatron.core.transformer.moe.router._AuxLossGroupConfig",
    "megatron.training.",
)
"""Configuration classes, by the beginning of their names, no field of which has an effect on a schedule: those of data,
tokenizers, checkpoints, inference and other models, the parts of refused settings, the blocks of a heterogeneous model,
and those of `megatron.training`, whose fields are the flags."""
