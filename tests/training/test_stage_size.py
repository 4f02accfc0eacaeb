"""What a layer keeps: computed from the flags, measured on real layers, and as published."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.zero_bubble.cli.trainings import complete_training, one_process, rank_model
from megatron.zero_bubble.job.model_states import element_bytes
from megatron.zero_bubble.runtime.profiler import SavedTensorMeter
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Placement
from megatron.zero_bubble.training.attention_size import AttentionKernel, attention_flops, attention_kernel
from megatron.zero_bubble.training.model_size import StageLayers
from megatron.zero_bubble.training.stage_size import stage_activations, stage_flops

JOB = "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 300 "
JOB += "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 1 --lr 1e-4 --mock-data"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
GROUPED = "--group-query-attention --num-query-groups 2"
LLAMA = f"{GROUPED} --position-embedding-type rope --swiglu --disable-bias-linear"
FLASH, UNFUSED = "--attention-backend flash", "--attention-backend unfused"
TE = "--transformer-impl transformer_engine"
LAYER = StageLayers(1, is_first=False, is_last=False)


def arguments(flags: str, world_size: int = 2, *, has_cuda: bool = True):
    given = f"{JOB} {flags}".split()
    return complete_training(given, world_size, "test", has_cuda=has_cuda, for_this_machine=False)[0]


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [
        (f"--bf16 {FLASH}", AttentionKernel.TORCH),
        (f"--bf16 {UNFUSED}", AttentionKernel.LOCAL),
        (f"{FLASH} --micro-batch-size 1", AttentionKernel.TORCH),
        ("--attention-backend local", AttentionKernel.LOCAL),
        (f"--bf16 {FLASH} {GROUPED}", AttentionKernel.TORCH),
        (f"--bf16 {UNFUSED} {GROUPED}", AttentionKernel.LOCAL),
        (f"--bf16 {FLASH} {LLAMA}", AttentionKernel.TORCH),
        (f"--bf16 {UNFUSED} {LLAMA}", AttentionKernel.LOCAL),
        (f"--bf16 {FLASH} --reset-attention-mask", AttentionKernel.TORCH),
        (f"{FLASH} {LLAMA}", AttentionKernel.TORCH_MATH),
        (f"--bf16 {FLASH} {GROUPED} --reset-attention-mask", AttentionKernel.TORCH_MATH),
        (f"--bf16 {FLASH} --recompute-activations", AttentionKernel.TORCH),
        (f"--bf16 {UNFUSED} {LLAMA} --recompute-activations", AttentionKernel.LOCAL),
    ],
)
def test_a_layer_keeps_what_is_computed_with_every_attention(flags, kernel):
    """A real layer keeps a little more: tokens, positions, rotations and statistics, whatever its width."""
    args = arguments(f"{flags} {NO_DROPOUT}", has_cuda=False)
    assert attention_kernel(args) is kernel
    computed = stage_activations(args, StageLayers(1, is_first=True, is_last=False)).after_f
    shape = (args.micro_batch_size, args.seq_length)
    mask = torch.ones(shape[0], 1, shape[1], shape[1]).triu(1) > 0 if args.reset_attention_mask else None
    store = WeightGradStore()
    meter, f = SavedTensorMeter(store), Op(OpKind.F, 0, 0)
    with one_process(args):
        [chunk] = rank_model(args, Placement("linear", 2), 0, store)
        with sdpa_kernel(SDPBackend.MATH) if kernel is AttentionKernel.TORCH_MATH else nullcontext():
            meter.begin(f)
            output = chunk(torch.zeros(shape, dtype=torch.long), torch.arange(shape[1]).expand(shape), mask)
            measured = meter.end(f)
    assert output.requires_grad
    a_token = 16 + element_bytes(args) * (4 + (2 * args.kv_channels if "rope" in flags else 0))
    assert 0 <= measured - computed <= a_token * shape[0] * shape[1] + 64**2


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ("", 0),
        (FLASH, 0),
        ("--attention-backend local", 4 + 2 + 1),
        (f"{TE} {UNFUSED}", 2 + 2 + 1),
        (TE, 0),
        (f"{TE} --attention-backend fused", 0),
    ],
)
def test_a_plain_layer_keeps_scores_only_in_unfused_attention(flags, scores):
    """Korthikanti et al. 2022: sb (34h + 5as) in half precision with dropout; fused attention keeps 4a instead."""
    args = arguments(f"--bf16 {flags}")
    s, b, h, a = 64, 2, 48, 4
    held = stage_activations(args, LAYER)
    assert held.after_f == s * b * (34 * h + (scores * a * s if scores else 4 * a))
    assert held.after_b == 32 * s * b * h


def test_flash_attn_transposes_its_output_unless_a_microbatch_is_one_sequence():
    kept = {
        (backend, b): stage_activations(
            arguments(f"--bf16 {TE} --attention-backend {backend} --micro-batch-size {b}"), LAYER
        )
        for backend in ("flash", "fused")
        for b in (1, 2)
    }
    assert kept["flash", 1] == kept["fused", 1]
    assert kept["flash", 2].after_f - kept["fused", 2].after_f == 2 * 2 * 64 * 48


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [
        (TE, AttentionKernel.TE_UNFUSED),  # in fp32
        (f"{TE} --bf16", AttentionKernel.TE_FUSED),
        ("--bf16", AttentionKernel.TORCH),
        ("", AttentionKernel.TORCH),
        (f"--bf16 --context-parallel-size 2 {GROUPED}", AttentionKernel.TORCH_MATH),
        (f"--bf16 --context-parallel-size 2 {GROUPED} {TE}", AttentionKernel.TE_FUSED),
    ],
)
def test_the_kernel_is_the_one_that_the_job_runs_on_a_gpu(flags, kernel):
    assert attention_kernel(arguments(flags, world_size=4)) is kernel


def test_on_a_cpu_the_kernel_is_megatron_cores():
    assert attention_kernel(arguments("--bf16", has_cuda=False)) is AttentionKernel.LOCAL


def test_a_plain_layer_computes_what_is_published_and_a_fused_one_half_of_the_scores_and_one_product_more():
    s, b, h = 64, 2, 48
    linear = s * b * h * 24 * h
    whole = s * b * h * 4 * s
    unfused, fused = (stage_flops(arguments(f"--bf16 {flags}"), LAYER) for flags in (UNFUSED, FLASH))
    assert unfused == (linear + whole, linear + 2 * whole, linear, 0)
    assert fused == (linear + whole / 2, linear + 2.5 * whole / 2, linear, 0)


def test_a_mask_as_a_tensor_is_not_skipped_and_is_kept():
    plain, masked = (arguments(f"--bf16 {flags}") for flags in ("", "--reset-attention-mask"))
    assert attention_flops(masked) == tuple(2 * flops for flops in attention_flops(plain))
    more = stage_activations(masked, LAYER).after_f - stage_activations(plain, LAYER).after_f
    assert more == 2 * 2 * 64 * 64


def test_context_parallel_ranks_share_tokens_and_local_ones_gather_keys():
    whole, half = (arguments(f"--bf16 {TE} {flags}", 4) for flags in ("", "--context-parallel-size 2"))
    assert stage_activations(half, LAYER).after_f == stage_activations(whole, LAYER).after_f / 2
    assert stage_flops(half, LAYER).total == stage_flops(whole, LAYER).total / 2
    local = arguments("--bf16 --context-parallel-size 2", 4)
    s, b, h, size = 64 / 2, 2, 48, 2
    gathered, mask = 2 * 2 * size * s * b * h, size * s * 64
    assert stage_activations(local, LAYER).after_f == stage_activations(half, LAYER).after_f + gathered + mask
