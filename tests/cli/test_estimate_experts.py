"""The estimate counts the messages between experts, and the time that pairs save by overlapping them."""

from __future__ import annotations

import shlex

import pytest
from estimated_jobs import FOUR, job
from flagged_job import JOB

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate
from megatron.zero_bubble.cli.estimate_command import main

DEEPSEEK_V3 = shlex.split(
    """
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096 --bf16
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --mtp-num-layers 1 --num-experts 256 --moe-ffn-hidden-size
    2048 --moe-layer-freq '([0]*3+[1]*58)' --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --untie-embeddings-and-output-weights
    --vocab-size 129279 --attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 8 --expert-model-parallel-size 64 --micro-batch-size 1 --global-batch-size 1024
    --use-distributed-optimizer --recompute-granularity selective --recompute-modules mla_up_proj mlp moe_act
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --pipeline-model-parallel-layout 'Et|(tt|)*30mL'
    --zero-bubble --zero-bubble-placement interleaved
    """
)
OVERLAP = "--overlap-moe-expert-parallel-comm"


def deepseek_v3(*flags: str) -> EstimatedJob:
    """The recipe's layout: the embedding and one layer, 30 stages of two layers, and the prediction layer."""
    cluster = ["--world-size", "1024", "--device-tflops", "989", "--expert-bandwidth", "50"]
    return job(*DEEPSEEK_V3, *flags, tool=cluster)


def test_messages_between_experts_take_what_their_bytes_take():
    layers = deepseek_v3(OVERLAP).costs.layers
    tokens = 4096 / 2 * 8 * 63 / 64  # of a tensor-parallel rank, to eight experts each, one in 64 of which are its own
    milliseconds = 2 * (0.02 + tokens * 7168 * 2 / 50e9 * 1e3)
    assert [layer.all_to_all_f for layer in layers] == [0] * 3 + [pytest.approx(milliseconds)] * 58
    assert [layer.all_to_all_b for layer in layers] == [layer.all_to_all_f for layer in layers]


def test_overlapping_them_makes_deepseek_v3_faster():
    alone, overlapped = (estimate(deepseek_v3(*flags), "auto") for flags in ((), (OVERLAP,)))
    megatrons = estimate(deepseek_v3(OVERLAP), "interleaved-pairs")
    assert alone.gain_of_pairs is None
    assert overlapped.gain_of_pairs > 1.15
    assert overlapped.iteration_ms <= megatrons.iteration_ms * (1 + 1e-9)
    assert max(overlapped.activation_bytes) <= max(megatrons.activation_bytes) * (1 + 1e-9)


def test_what_pairs_do_not_work_with_is_refused(capsys):
    flags = ["--num-experts", "8", "--disable-bias-linear", OVERLAP]
    assert main([*FOUR, "--", *JOB, *flags]) == 2
    assert "does not work with --expert-model-parallel-size 1" in capsys.readouterr().err
    assert "--untie-embeddings-and-output-weights" in DEEPSEEK_V3
    tied = [flag for flag in DEEPSEEK_V3 if flag != "--untie-embeddings-and-output-weights"]
    assert main(["--world-size", "1024", "--", *tied, OVERLAP]) == 2
    assert "give --untie-embeddings-and-output-weights" in capsys.readouterr().err
