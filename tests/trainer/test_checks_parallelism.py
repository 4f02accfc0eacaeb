"""Layers, heads, experts and shards that ranks cannot divide are refused in one line that names the flags."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import names
from tests.checked_flags import refusal

TENSOR_2 = {"--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2"}
FULLY_SHARDED = {
    "--use-torch-fsdp2": None,
    "--untie-embeddings-and-output-weights": None,
    "--zero-bubble-schedule": "zb-h1",
}

MISTAKES = {
    "learned positions of two stages in one checkpoint": (
        {"--save": "FOLDER", "--mtp-num-layers": "1", "--pipeline-model-parallel-size": "2"},
        "--save FOLDER with --mtp-num-layers 1 needs --position-embedding-type rope: the first and the last stage "
        "learn separate positions, but a checkpoint holds only one of both",
    ),
    "learned positions of two stages from one checkpoint": (
        {"--load": "FOLDER", "--mtp-num-layers": "1", "--pipeline-model-parallel-size": "2"},
        "--load FOLDER with --mtp-num-layers 1 needs --position-embedding-type rope: the first and the last stage "
        "learn separate positions, but a checkpoint holds only one of both",
    ),
    "ranks that make no whole replica": (
        TENSOR_2 | {"--pipeline-model-parallel-size": "3"},
        "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 3 = 6 ranks do not divide the 4 ranks of "
        "the job: torchrun --nproc-per-node must give a multiple of 6",
    ),
    "more stages than layers": (
        {"--num-layers": "2"},
        "--pipeline-model-parallel-size 4 has more stages than --num-layers 2",
    ),
    "stages of different length": (
        {"--num-layers": "6"},
        "--num-layers 6 is not a multiple of the 4 stages that --pipeline-model-parallel-size 4 "
        "and 1 model chunks a rank give; --allow-padding-num-layers spreads them unevenly",
    ),
    "chunks of different length": (
        {"--num-layers-per-virtual-pipeline-stage": "3"},
        "--num-layers 8 is not a multiple of --pipeline-model-parallel-size 4 x "
        "--num-layers-per-virtual-pipeline-stage 3",
    ),
    "chunks said twice": (
        {"--num-layers-per-virtual-pipeline-stage": "1", "--num-virtual-stages-per-pipeline-rank": "2"},
        "give --num-virtual-stages-per-pipeline-rank or --num-layers-per-virtual-pipeline-stage, not both",
    ),
    "heads that tensor ranks cannot share": (
        TENSOR_2 | {"--num-attention-heads": "1"},
        "--num-attention-heads 1 is not a multiple of --tensor-model-parallel-size 2",
    ),
    "query groups that tensor ranks cannot share": (
        TENSOR_2 | {"--group-query-attention": None, "--num-query-groups": "1"},
        "--num-query-groups 1 is not a multiple of --tensor-model-parallel-size 2",
    ),
    "an MLP that tensor ranks cannot share": (
        TENSOR_2 | {"--ffn-hidden-size": "99"},
        "--ffn-hidden-size 99 is not a multiple of --tensor-model-parallel-size 2",
    ),
    "instances of an optimizer that is not sharded": (
        {"--num-distributed-optimizer-instances": "2"},
        "--num-distributed-optimizer-instances 2 needs --use-distributed-optimizer: each instance shards the "
        "optimizer's state",
    ),
    "instances that do not divide the replicas": (
        {"--num-distributed-optimizer-instances": "2", "--use-distributed-optimizer": None},
        "--num-distributed-optimizer-instances 2 must divide the 1 data- and context-parallel ranks",
    ),
    "keeping parameters that are not sharded": (
        {"--torch-fsdp2-no-reshard-after-forward": None},
        "--torch-fsdp2-no-reshard-after-forward needs --use-torch-fsdp2",
    ),
    "sharded gradients that are not sharded": (
        {"--zero-bubble-reduce-every-microbatch": None},
        "--zero-bubble-reduce-every-microbatch needs --use-torch-fsdp2",
    ),
    "fully sharded, tied embeddings": (
        {"--use-torch-fsdp2": None, "--zero-bubble-schedule": "zb-h1"},
        "--use-torch-fsdp2 needs --untie-embeddings-and-output-weights: FSDP cannot share a weight",
    ),
    "fully sharded, optimizer sharded again": (
        FULLY_SHARDED | {"--use-distributed-optimizer": None},
        "--use-distributed-optimizer does not work with --use-torch-fsdp2: FSDP already shards the optimizer: leave it "
        "out",
    ),
    "fully sharded, fp16": (
        FULLY_SHARDED | {"--fp16": None},
        "--fp16 does not work with --use-torch-fsdp2: the shards would not share one loss scale: use --bf16",
    ),
    "fully sharded, post-validation": (
        FULLY_SHARDED | {"--zero-bubble-post-validation": None},
        "--zero-bubble-post-validation does not work with --use-torch-fsdp2: a step cannot be undone in a shard: use "
        "--use-distributed-optimizer",
    ),
    "fully sharded, vocabulary shards": (
        FULLY_SHARDED | {"--zero-bubble-vocabulary-parallel": "on"},
        "--zero-bubble-vocabulary-parallel on does not work with --use-torch-fsdp2: the vocabulary would be cut twice: "
        "leave it out",
    ),
    "experts with a bias": (
        {"--num-experts": "4"},
        "--num-experts 4 needs --disable-bias-linear, or --moe-grouped-gemm with Transformer Engine",
    ),
    "experts on tensor-parallel ranks": (
        {
            "--num-experts": "4",
            "--disable-bias-linear": None,
            "--tensor-model-parallel-size": "2",
            "--pipeline-model-parallel-size": "2",
        },
        "--num-experts 4 with --tensor-model-parallel-size 2 needs --sequence-parallel: megatron-core trains no "
        "experts without it",
    ),
    "experts that ranks cannot share": (
        {"--num-experts": "4", "--disable-bias-linear": None, "--expert-model-parallel-size": "2"},
        "--expert-model-parallel-size 2 x --tensor-model-parallel-size 1 must divide the 1 ranks of a pipeline stage",
    ),
    "experts that tensor ranks cannot share": (
        TENSOR_2 | {"--expert-model-parallel-size": "2", "--expert-tensor-parallel-size": "2"},
        "--expert-model-parallel-size 2 x --expert-tensor-parallel-size 2 must divide the 2 ranks of a pipeline stage",
    ),
    "ranks of experts without experts": (
        {"--pipeline-model-parallel-size": "2", "--expert-model-parallel-size": "2", "--context-parallel-size": "2"},
        "--expert-model-parallel-size 2 needs --num-experts",
    ),
    "fewer experts than ranks that share them": (
        {
            "--num-experts": "3", "--pipeline-model-parallel-size": "2", "--expert-model-parallel-size": "2",
            "--context-parallel-size": "2",
        },
        "--expert-model-parallel-size 2 must divide --num-experts 3",
    ),
    "instances that do not divide the ranks with the same experts": (
        {
            "--num-experts": "4", "--pipeline-model-parallel-size": "2", "--expert-model-parallel-size": "2",
            "--disable-bias-linear": None, "--context-parallel-size": "2", "--use-distributed-optimizer": None,
            "--num-distributed-optimizer-instances": "2",
        },
        "--num-distributed-optimizer-instances 2 must divide the 2 data- and context-parallel ranks and the 1 ranks "
        "with the same experts",
    ),
    "more experts for a token than there are": (
        {"--num-experts": "4", "--disable-bias-linear": None, "--moe-router-topk": "5"},
        "--moe-router-topk 5 is not between 1 and --num-experts 4",
    ),
    "a sequence that tensor ranks cannot share": (
        TENSOR_2 | {"--sequence-parallel": None, "--seq-length": "33"},
        "--sequence-parallel splits --seq-length 33 over --tensor-model-parallel-size 2: the size must divide the "
        "length",
    ),
    "experts computed together without a GPU": (
        {"--num-experts": "4", "--disable-bias-linear": None, "--moe-grouped-gemm": None},
        "--moe-grouped-gemm needs CUDA, because it is a CUDA kernel: leave it out",
    ),
    "an unknown schedule": (
        {"--zero-bubble-schedule": "zb-h3"},
        f"--zero-bubble-schedule zb-h3: schedule 'zb-h3' is unknown: choose one of {', '.join(names())}",
    ),
    "a schedule for one chunk with several": (
        {"--zero-bubble-schedule": "zb-h1", "--num-virtual-stages-per-pipeline-rank": "2"},
        "--zero-bubble-schedule zb-h1: schedule zb-h1 has 1 chunks a rank, got 2",
    ),
    "microbatches that do not fill an interleaved pipeline": (
        {"--zero-bubble-schedule": "interleaved-1f1b", "--global-batch-size": "6"},
        "--zero-bubble-schedule interleaved-1f1b: schedule interleaved-1f1b needs at least 4 microbatches, "
        "one for every rank, got 3",
    ),
    "a schedule file that is not there": (
        {"--zero-bubble-schedule": "file:nothing.json"},
        "--zero-bubble-schedule file:nothing.json: cannot be read: "
        "[Errno 2] No such file or directory: 'nothing.json'",
    ),
    "no pipeline to fill": (
        {"--zero-bubble": None, "--pipeline-model-parallel-size": "1"},
        "--zero-bubble needs --pipeline-model-parallel-size of at least 2, got 1",
    ),
    "no pipeline for a schedule": (
        {"--zero-bubble-schedule": "zb-h2", "--pipeline-model-parallel-size": "1"},
        "--zero-bubble-schedule zb-h2 needs --pipeline-model-parallel-size of at least 2, got 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_that_names_flags_and_values(changes, message):
    assert refusal(changes) == message
