"""Estimates agree with the memory, parameters and operations that are published for large models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from estimated_jobs import job

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate
from megatron.zero_bubble.trainer.model_count import count_model
from tests.launch import ROOT

PAPER = json.loads((ROOT / "tests" / "cli" / "paper_memory.json").read_text())
"""Peak memory in GB that Qi et al. 2024 report on A100 with 80 GB."""
BF16 = "--bf16 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
BF16 += "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 1 "
BF16 += "--micro-batch-size 1 --use-distributed-optimizer --pipeline-model-parallel-size 8 --sequence-parallel"
DEEPSEEK_V3 = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --seq-length 4096
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --vocab-size 129279
--num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-router-pre-softmax --moe-grouped-gemm
--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-permute-fusion
--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --tensor-model-parallel-size 2 --expert-model-parallel-size 64
--global-batch-size 15360 --allow-padding-num-layers
"""
LLAMA_3_1_405B = """
--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention
--num-query-groups 8 --seq-length 8192 --rotary-base 500000 --use-rope-scaling --vocab-size 128255
--tensor-model-parallel-size 8 --context-parallel-size 2 --num-virtual-stages-per-pipeline-rank 8
--global-batch-size 1536 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
"""
QWEN3_235B = """
--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --group-query-attention --num-query-groups 4
--kv-channels 128 --qk-layernorm --seq-length 4096 --rotary-base 1000000 --vocab-size 151935 --num-experts 128
--moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-grouped-gemm --tensor-model-parallel-size 2
--expert-model-parallel-size 32 --global-batch-size 2048 --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split
"""
GPT_OSS_20B = """
--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --kv-channels 64
--group-query-attention --num-query-groups 8 --seq-length 4096 --vocab-size 201088 --num-experts 32
--moe-ffn-hidden-size 2880 --moe-router-topk 4 --moe-grouped-gemm --quick-geglu --glu-linear-offset 1.0
--activation-func-clamp-value 7.0 --softmax-type learnable --window-size 128,0 --window-attn-skip-freq 2
--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --bf16
--make-vocab-size-divisible-by 1 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 64
--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer
"""


def paper_job(name: str) -> EstimatedJob:
    """The job that examples/estimate_paper.sh estimates."""
    size = PAPER[name]["model"]
    p, batch = size["pipeline"], size["micro_batch"]
    flags = ["--num-layers", size["layers"], "--hidden-size", size["hidden"], "--num-attention-heads", size["heads"]]
    flags += ["--pipeline-model-parallel-size", p, "--micro-batch-size", batch, "--global-batch-size", 3 * p * batch]
    flags += ["--num-virtual-stages-per-pipeline-rank", size["chunks"], "--fp16"]
    flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    flags += ["--seq-length", 1024, "--vocab-size", 50257, "--untie-embeddings-and-output-weights"]
    flags += ["--transformer-impl", "transformer_engine", "--attention-backend", "unfused"]
    tool = ["--world-size", str(p), "--reserved-memory", "1B"]
    return job(*map(str, flags), tool=tool)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("1.5B", "28.3B") else pytest.mark.exhaustive) for name in PAPER]
)
def test_memory_is_within_6_percent_of_the_papers(name):
    measured = PAPER[name]["peak_memory_GB"]
    found = {schedule: max(estimate(paper_job(name), schedule).total_bytes) / 1e9 for schedule in measured}
    assert found == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [(DEEPSEEK_V3, 671.03, 37.6), (LLAMA_3_1_405B, 405.85, 405.9), (QWEN3_235B, 235.09, 22.2)],
    ids=["DeepSeek-V3", "Llama 3.1 405B", "Qwen3-235B"],
)
def test_published_models_have_their_parameters_and_operations(model, billions, active):
    """For each token, F computes two operations per active parameter outside the embedding, and attention."""
    estimated = job(*model.split(), *BF16.split(), tool=["--world-size", "1024"])
    assert sum(unit.whole for unit in estimated.count.units) / 1e9 == pytest.approx(billions, rel=1e-4)
    args = estimated.args
    embedding = args.padded_vocab_size * args.hidden_size / 1e9
    channels = 320 / 2 if args.multi_latent_attention else args.kv_channels
    attended = 2 * args.seq_length / 2 * channels * args.num_attention_heads / 1e9
    layers = args.num_layers + (args.mtp_num_layers or 0)
    further = 0 if args.mtp_num_layers is None else further_parameters(args) / 1e9
    computed = estimated.flops_of_sequence / args.seq_length / 6 / 1e9
    assert computed == pytest.approx(active - embedding + layers * attended + further, rel=0.01)


def test_experts_with_biases_are_counted_but_for_the_biases():
    """GPT-OSS 20B has 20.91 billion parameters, of which 7 million are biases of experts."""
    estimated = job(*GPT_OSS_20B.split(), tool=["--world-size", "32"])
    assert sum(unit.whole for unit in estimated.count.units) / 1e9 == pytest.approx(20.91, rel=1e-3)


def further_parameters(args) -> float:
    """Parameters that a token passes in the prediction layer: those of an expert layer, the joining, and the logits."""
    one = count_model(replace(args, tensor_model_parallel_size=1, sequence_parallel=False)).layers[-1]
    held = 256 // args.expert_model_parallel_size
    joining = 2 * args.hidden_size**2
    return one.parameters.dense + one.parameters.expert / held * 8 + joining + args.padded_vocab_size * args.hidden_size


def test_the_defaults_are_megatron_lms():
    """A recipe without --transformer-impl means Transformer Engine, whose attention and gated MLP are fused."""
    model = [*LLAMA_3_1_405B.split(), *BF16.split()]
    plain, engine, local = (
        max(estimate(job(*model, *more, tool=["--world-size", "1024"]), "1f1b").activation_bytes)
        for more in ((), ("--transformer-impl", "transformer_engine"), ("--transformer-impl", "local"))
    )
    assert plain == engine
    # sb/(tc) (18 h + 4 kv + 6 f) and a logarithm of each head's sums: 16 layers, of 8 microbatches
    h, f, tokens = 16384, 53248, 8192 / 2
    assert engine == pytest.approx(16 * 8 * tokens / 8 * (10 * h + 2 * 2 * 1024 + 6 * f + 4 * 128), rel=0.07)
    assert local > 1.3 * engine
