"""What a layer keeps and computes: counted on the meta device, measured on real layers, and as published."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.zero_bubble.cli.trainings import one_process, rank_model
from megatron.zero_bubble.mcore.counted_layers import AttentionKernel
from megatron.zero_bubble.runtime.memory_meter import SavedTensorMeter
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Placement
from megatron.zero_bubble.session.model_states import element_bytes
from megatron.zero_bubble.trainer.model import layer_kinds
from megatron.zero_bubble.trainer.model_count import (
    Activations,
    Flops,
    attention_kernel,
    count_model,
)
from tests.trainer.counted_job import GROUPED, arguments

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
LLAMA = f"{GROUPED} --position-embedding-type rope --swiglu --disable-bias-linear"
LATENT = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
LATENT += "--v-head-dim 12 --qk-layernorm --position-embedding-type rope --swiglu --disable-bias-linear"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear"
FLASH, UNFUSED = "--attention-backend flash", "--attention-backend unfused"
TE = "--transformer-impl transformer_engine"


def held(flags: str, world_size: int = 2) -> Activations:
    return count_model(arguments(flags, world_size)).layers[0].activations


def computed(flags: str, world_size: int = 2) -> Flops:
    return count_model(arguments(flags, world_size)).layers[0].flops


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
        (f"--bf16 {UNFUSED} {LATENT}", AttentionKernel.LOCAL),
        (f"--bf16 {UNFUSED} {EXPERTS}", AttentionKernel.LOCAL),
    ],
)
def test_a_layer_keeps_what_is_counted_with_every_attention(flags: str, kernel: AttentionKernel) -> None:
    """A real layer keeps a little more: statistics of norms, rotations, places of tokens, and its own causal mask."""
    args = arguments(f"{flags} {NO_DROPOUT}", has_cuda=False)
    assert attention_kernel(args) is kernel
    count = count_model(args)
    counted = count.embedding.activations.after_f + count.layers[0].activations.after_f
    shape = (args.micro_batch_size, args.seq_length)
    mask = torch.ones(shape[0], 1, shape[1], shape[1]).triu(1) > 0 if args.reset_attention_mask else None
    store = WeightGradStore()
    meter, f = SavedTensorMeter(store), Op(OpKind.F, 0, 0)
    with torch.compiler.set_stance("force_eager"), one_process(args):
        [chunk] = rank_model(args, Placement("linear", 2), 0, store)
        with sdpa_kernel(SDPBackend.MATH) if kernel is AttentionKernel.TORCH_MATH else nullcontext():
            meter.begin(f)
            output = chunk(torch.zeros(shape, dtype=torch.long), torch.arange(shape[1]).expand(shape), mask)
            measured = meter.end(f)
    assert output.requires_grad
    a_token = 16 + element_bytes(args) * (4 + (2 * args.kv_channels if "rope" in flags else 0))
    if "experts" in flags:
        a_token += args.num_experts * 40  # tensors of probabilities, and maps from tokens to experts
    assert 0 <= measured - counted <= a_token * shape[0] * shape[1] + 64**2


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
def test_a_plain_layer_keeps_scores_only_in_unfused_attention(flags: str, scores: int) -> None:
    """Korthikanti et al. 2022: sb (34h + 5as) in half precision with dropout; fused attention keeps 4a instead."""
    s, b, h, a = 64, 2, 48, 4
    found = held(f"--bf16 {flags}")
    assert found.after_f == s * b * (34 * h + (scores * a * s if scores else 4 * a))
    assert found.after_b == 32 * s * b * h


def test_flash_attn_transposes_its_output_unless_a_microbatch_is_one_sequence() -> None:
    kept = {
        (backend, b): held(f"--bf16 {TE} --attention-backend {backend} --micro-batch-size {b}")
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
def test_the_kernel_is_the_one_that_the_job_runs_on_a_gpu(flags: str, kernel: AttentionKernel) -> None:
    assert attention_kernel(arguments(flags, world_size=4)) is kernel


def test_on_a_cpu_the_kernel_is_megatron_cores() -> None:
    assert attention_kernel(arguments("--bf16", has_cuda=False)) is AttentionKernel.LOCAL


def test_a_plain_layer_computes_what_is_published_and_a_fused_one_half_of_the_scores_and_one_product_more() -> None:
    s, b, h = 64, 2, 48
    linear, whole = s * b * h * 24 * h, s * b * h * 4 * s
    unfused, fused = (computed(f"--bf16 {flags}") for flags in (UNFUSED, FLASH))
    assert unfused == (linear + whole, linear + 2 * whole, linear, 0)
    assert fused == (linear + whole / 2, linear + 2.5 * whole / 2, linear, 0)


def test_a_window_leaves_fewer_products() -> None:
    s, b, h = 64, 2, 48
    windowed, whole = (computed(f"--bf16 {TE} {flags}") for flags in ("--window-size 16,0", ""))
    assert whole.f - windowed.f == 4 * b * h * (s * s / 2 - (16 * s - 16 * 16 / 2))


def test_a_mask_as_a_tensor_is_not_skipped_and_is_kept() -> None:
    plain, masked = "--bf16", "--bf16 --reset-attention-mask"
    attended = 64 * 2 * 48 * 4 * 64 / 2
    assert computed(masked).f - computed(plain).f == attended
    assert computed(masked).b - computed(plain).b == 2.5 * attended
    assert held(masked).after_f - held(plain).after_f == 2 * 2 * 64 * 64


def test_context_parallel_ranks_share_tokens_and_local_ones_gather_keys() -> None:
    whole, half = (f"--bf16 {TE} {flags}" for flags in ("", "--context-parallel-size 2"))
    assert held(half, 4).after_f == held(whole, 4).after_f / 2
    assert computed(half, 4).total == computed(whole, 4).total / 2
    s, b, h, size = 64 / 2, 2, 48, 2
    gathered, mask = 2 * 2 * size * s * b * h, size * s * 64
    assert held("--bf16 --context-parallel-size 2", 4).after_f == held(half, 4).after_f + gathered + mask


def test_layers_may_communicate_between_context_parallel_ranks_in_their_own_ways() -> None:
    of_layers = "--num-layers 4 --context-parallel-size 2 --cp-comm-type p2p all_gather p2p p2p"
    kept = [layer.activations for layer in count_model(arguments(f"--bf16 {TE} {of_layers}", 4)).layers]
    assert kept == [held(f"--bf16 {TE} --context-parallel-size 2", 4)] * 4
    assert layer_kinds(arguments(of_layers, 4)) == [0, 1, 0, 0]


def test_gated_mlps_keep_what_their_kernel_keeps() -> None:
    """Megatron-LM's fused kernel keeps its input, of twice the width; apart a gate, its copy and its product stay."""
    gated = f"--bf16 {TE} --swiglu --disable-bias-linear --ffn-hidden-size 96 {NO_DROPOUT}"
    fused, apart = held(gated), held(f"{gated} --no-bias-swiglu-fusion")
    s, b, h, f = 64, 2, 48, 96
    assert fused.after_f == 2 * s * b * (4 * h + 3 * h + h + 3 * f) + 4 * s * b * 4
    assert apart.after_f - fused.after_f == 2 * s * b * 2 * f


def test_routed_experts_compute_for_every_copy_of_a_token_and_keep_it() -> None:
    """Of four experts a token goes to two; two ranks have two of them each, and as many tokens as one rank alone."""
    dense = f"--bf16 {TE} --ffn-hidden-size 24 {NO_DROPOUT} --disable-bias-linear"
    one, two = (
        count_model(arguments(f"{dense} {EXPERTS} --expert-model-parallel-size {ranks}", 4)).layers[0]
        for ranks in (1, 2)
    )
    tokens, h, f = 64 * 2, 48, 24
    router = 2 * tokens * h * 4
    assert one.flops.f - computed(dense).f == 2 * tokens * 2 * h * f + router
    assert (one.flops, one.activations) == (two.flops, two.activations)
    assert one.parameters.expert == 2 * two.parameters.expert == 4 * 2 * h * f
    assert one.whole == two.whole == one.parameters.expert + one.parameters.dense
    copies = 2 * tokens * (2 * h + 2 * 2 * f) * 1  # two copies of the input, and of the MLP's two inner tensors
    assert 0 <= one.activations.after_f - held(dense).after_f - (copies - 2 * tokens * 2 * f) <= tokens * 4 * 40


@pytest.mark.parametrize(
    ("modules", "dropped", "is_computed_again"),
    [
        ("core_attn", 4 * 4, True),
        ("layernorm", 2 * 2 * 48, False),
        ("mla_up_proj", 2 * 4 * (2 * 12 + 12) - 2 * 4, True),  # the keys' positions are kept
        ("moe_act", 2 * 2 * 24, False),
        ("moe", None, True),
    ],
)
def test_selective_recomputation_drops_what_its_modules_restore(
    modules: str, dropped: int | None, is_computed_again: bool
) -> None:
    """By token: statistics of the softmax, outputs of norms, queries, keys and values, inner tensors of experts."""
    model = f"--bf16 {TE} {LATENT} {EXPERTS} --moe-grouped-gemm {NO_DROPOUT}"
    plain, selective = (
        count_model(arguments(f"{model} {flags}")).layers[0]
        for flags in ("", f"--recompute-granularity selective --recompute-modules {modules}")
    )
    less = plain.activations.after_f - selective.activations.after_f
    assert (selective.flops.b > plain.flops.b) is is_computed_again
    if dropped is None:
        assert less > plain.activations.after_f / 4
    else:
        assert less == pytest.approx(64 * 2 * dropped, abs=16)


@pytest.mark.parametrize("tensor", [1, 2])
def test_latent_projections_are_whole_on_every_tensor_parallel_rank_of_transformer_engine(tensor: int) -> None:
    flags = f"--bf16 {LATENT} --tensor-model-parallel-size {tensor}"
    split, whole = (count_model(arguments(f"{flags} {impl}", 4)).layers[0] for impl in ("", TE))
    down = 48 * (24 + 16 + 4)
    assert whole.parameters.dense - split.parameters.dense == down - down // tensor
    assert whole.whole == split.whole


def test_transformer_engine_keeps_inputs_that_it_gathers_for_b_until_w() -> None:
    """Inputs of the query-key-value and the first MLP layer, with the tokens of the other tensor-parallel rank."""
    flags = f"--bf16 {LLAMA} {FLASH} --tensor-model-parallel-size 2"
    apart, shared = (
        [held(f"{flags} {sequence} {impl}", 4) for impl in ("", TE)] for sequence in ("", "--sequence-parallel")
    )
    assert apart[1].after_b == apart[0].after_b
    tokens, hidden, element = 2 * 64, 48, 2
    assert shared[1].after_b - shared[0].after_b == 2 * tokens // 2 * hidden * element


def test_a_schedule_that_ran_before_changes_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--mtp-num-layers 1"
    count = count_model(arguments(flags))
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.ones(1, 64))
    assert count_model(arguments(flags)) == count


def test_counting_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    count_model(arguments(f"--bf16 {EXPERTS} --moe-aux-loss-coeff 0.1 --mtp-num-layers 1"))
    assert torch.equal(torch.get_rng_state(), state)
    assert not dist.is_initialized()
    assert torch.ones(1).device.type == "cpu"
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    assert scale is None or scale.device.type != "meta"


def test_a_hybrid_model_has_its_published_size_and_keeps_what_kernels_of_mamba_do() -> None:
    """Nemotron-H 8B: 8.1 billion parameters. Mamba keeps the output of a projection, and the scan's on both sides of
    its gate, the norm's output and its input."""
    pattern = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
    flags = f"--num-layers 52 --hybrid-layer-pattern {pattern} --hidden-size 4096 --ffn-hidden-size 21504 --bf16 "
    flags += "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --disable-bias-linear "
    flags += "--seq-length 256 --vocab-size 131072 --make-vocab-size-divisible-by 1 --position-embedding-type rope "
    count = count_model(arguments(f"{flags} --attention-backend flash {NO_DROPOUT} --normalization RMSNorm"))
    assert sum(unit.whole for unit in count.units) == pytest.approx(8.10e9, rel=2e-3)
    mamba, tokens, inner, projected = count.layers[0], 2 * 256, 8192, 2 * 8192 + 2 * 8 * 128 + 128
    assert mamba.flops.w == 2 * tokens * 4096 * (projected + inner)
    assert mamba.flops.f == mamba.flops.w + 7 * tokens * inner * 128
    kept = 2 * tokens * (2 * 4096 + projected + 3 * inner)
    assert mamba.activations.after_f == pytest.approx(kept, rel=2e-2)
