"""What follows from the flags of a job."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.trainer.arguments import parse_arguments
from tests.launch import TINY_GPT

WITHOUT_COSTS = re.compile(
    # Layout, groups of ranks and communication, which a profile has in other words.
    r"(pipeline|virtual_pipeline|hierarchical|hybrid|num_layers_in|account_for|microbatch|num_microbatches|max_seqlen)_.*"
    r"|mtp_standalone|cp_comm_type|.*p2p.*|tp_comm_(?!overlap$).*|tp_only_amax_red|symmetric_ar_type|sequence_parallel"
    # Numbers without operations of their own, functions, and what schedules set.
    r"|.*(func|func_.*|_context|init_method|init_method_std|_coeff|_eps|_scale|_factory|dtype|timers|clipping)|qk_clip|softmax_.*"
    r"|use_(cpu_initialization|te_rng_tracker|te_activation_func|kitchen.*|inference.*)|init_model.*|.*(logging|logit|test_mode)"
    r"|calculate_per_token_loss|variable_seq_lengths|deallocate.*|defer_.*|delay_.*|overlap_.*|ep_overlap.*|enable_autocast"
    # Kernels that compute the same operations, and modes that no schedule of ours allows or that do not train.
    r"|.*(fusion|cuda_graph.*|inference.*|offloading.*|layer_norm|batch_invariant.*|deterministic.*|backward_graph|mempool)"
    r"|fused_.*|use_fused.*|flash_decode|cache_mla_latents|hete.*|quant_recipe|mrope_section|is_hybrid_model"
    r"|fp[48]_.*|first_last_.*|disable_.*|.*layernorm_(post|zero).*|rotary_interleaved|apply_(query|residual).*|distribute_saved.*|mamba_.*"
    r"|moe_(enable_routing_replay|input_jitter.*|router_topk_scaling_factor)|gated_linear_unit|num_moe_experts|dsa_.*loss"
)
"""Fields that are off by default, and on which no cost of a stage depends but what a profile has in other words."""


def test_a_job_ends_at_the_next_multiple_of_the_exit_interval() -> None:
    flags = JobFlags(train_iters=10, exit_interval=4)
    assert [flags.num_iterations(start) for start in range(11)] == [4, 3, 2, 1, 4, 3, 2, 1, 2, 1, 0]
    of_samples = replace(flags, train_iters=None)  # as with --train-samples
    assert [of_samples.num_iterations(start) for start in range(5)] == [4, 3, 2, 1, 4]
    assert replace(of_samples, exit_interval=None).num_iterations(0) is None


def test_a_profile_tells_every_setting_that_is_off_by_default_and_costs_time() -> None:
    """A release with a new field makes this fail: it belongs to the model of `JobFlags` or above."""
    args = parse_arguments([*TINY_GPT, "--micro-batch-size", "1", "--num-experts", "4", "--multi-latent-attention"])
    off = {entry.name for entry in fields(MLATransformerConfig) if entry.default is None or entry.default is False}
    told = JobFlags.of(args).model
    given = {name for name in off if hasattr(args, name)}
    assert {name for name in given - told.keys() if not WITHOUT_COSTS.fullmatch(name)} == set()


@pytest.mark.parametrize("setting", [("--moe-ffn-hidden-size", "64"), ("--window-size", "8,0"), ("--qk-layernorm",)])
def test_a_profile_of_other_layers_does_not_fit(setting: tuple[str, ...]) -> None:
    flags = (*TINY_GPT, "--micro-batch-size", "1", "--num-experts", "4")
    assert JobFlags.of(parse_arguments([*flags, *setting])).model != JobFlags.of(parse_arguments(flags)).model
