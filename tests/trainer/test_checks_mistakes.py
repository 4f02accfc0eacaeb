"""Every mistake that can be seen from the command line alone is one line that names the flag and what would work."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import names
from tests.checked_flags import checked

TENSOR_2 = {"--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2"}
FULLY_SHARDED = {
    "--use-torch-fsdp2": None,
    "--untie-embeddings-and-output-weights": None,
    "--zero-bubble-schedule": "zb-h1",
}

AT_LEAST_ONE = """
num-layers hidden-size num-attention-heads seq-length micro-batch-size max-position-embeddings ffn-hidden-size
kv-channels make-vocab-size-divisible-by num-query-groups tensor-model-parallel-size pipeline-model-parallel-size
train-iters global-batch-size seed log-interval eval-interval save-interval exit-interval
distributed-timeout-minutes vocab-size ddp-bucket-size lr-decay-iters recompute-num-layers
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
microbatch-group-size-per-virtual-pipeline-stage num-distributed-optimizer-instances
"""
NOT_NEGATIVE = "lr min-lr weight-decay clip-grad init-method-std exit-duration-in-mins"
POSITIVE = "norm-epsilon adam-eps"
FRACTION = "attention-dropout hidden-dropout adam-beta1 adam-beta2"


@pytest.mark.parametrize(
    ("name", "value", "expectation"),
    [
        *[(name, value, "must be at least 1") for name in AT_LEAST_ONE.split() for value in ("0", "-3")],
        *[(name, value, "must be at least 0") for name in NOT_NEGATIVE.split() for value in ("-0.5", "nan", "inf")],
        *[(name, "-1", "must be at least 0") for name in ("eval-iters", "num-workers", "lr-warmup-iters")],
        *[(name, value, "must be above 0") for name in POSITIVE.split() for value in ("0.0", "-1.0", "nan")],
        *[(name, value, "must be in [0, 1)") for name in FRACTION.split() for value in ("1.0", "-0.1", "nan")],
        *[("rotary-percent", value, "must be in (0, 1]") for value in ("0.0", "1.5", "nan")],
        ("rotary-base", "0", "must be above 0"),
        ("timing-log-level", "3", "must be 0, 1 or 2"),
        ("empty-unused-memory-level", "3", "must be 0, 1 or 2"),
    ],
)
def test_a_value_out_of_range(name, value, expectation):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked({f"--{name}": value})
    assert str(error.value) == f"--{name} {expectation}, got {value}"


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
    "heads do not divide the width": (
        {"--hidden-size": "66"},
        "--hidden-size 66 is not a multiple of --num-attention-heads 4",
    ),
    "query groups do not divide the heads": (
        {"--group-query-attention": None, "--num-query-groups": "3"},
        "--num-attention-heads 4 is not a multiple of --num-query-groups 3",
    ),
    "positions for a part of the sequence": (
        {"--max-position-embeddings": "16"},
        "--max-position-embeddings 16 is below --seq-length 32",
    ),
    "an odd number of channels to rotate": (
        {"--position-embedding-type": "rope", "--kv-channels": "5"},
        "--position-embedding-type rope rotates pairs of channels, but a head has 5: "
        "choose another --kv-channels, or a --rotary-percent below 1.0",
    ),
    "documents apart in attention that knows no mask": (
        {"--reset-attention-mask": None, "--transformer-impl": "transformer_engine"},
        "--reset-attention-mask needs --transformer-impl local: attention of transformer_engine ignores "
        "the mask, and is always causal",
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
    "gathering parameters without sharding them": (
        {"--overlap-param-gather": None, "--overlap-grad-reduce": None},
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    ),
    "nccl without a GPU": (
        {"--distributed-backend": "nccl"},
        "--distributed-backend nccl needs CUDA, and torch finds none on this machine: use gloo",
    ),
    "microbatches that do not divide the batch": (
        {"--global-batch-size": "7"},
        "--global-batch-size 7 is not a multiple of --micro-batch-size 2 x 1 data-parallel replicas = 2",
    ),
    "a ramp of nothing": (
        {"--global-batch-size": "8", "--rampup-batch-size": "2 2 0"},
        "--rampup-batch-size 2 2 0: all three numbers must be at least 1",
    ),
    "a ramp in parts of a microbatch": (
        {"--global-batch-size": "8", "--rampup-batch-size": "2 3 100"},
        "--rampup-batch-size 2 3 100: start and increment must be multiples of "
        "--micro-batch-size 2 x 1 data-parallel replicas = 2",
    ),
    "a ramp past the batch": (
        {"--global-batch-size": "8", "--rampup-batch-size": "4 6 100"},
        "--rampup-batch-size 4 6 100: 4 plus a multiple of 6 is not --global-batch-size 8",
    ),
    "a ramp that starts at its end": (
        {"--global-batch-size": "8", "--rampup-batch-size": "8 2 100"},
        "--rampup-batch-size 8 2 100: 8 plus a multiple of 2 is not --global-batch-size 8",
    ),
    "the learning rate's ends swapped": ({"--min-lr": "0.1"}, "--min-lr 0.1 is above --lr 0.001"),
    "a warm-up longer than the decay": (
        {"--lr-warmup-iters": "10"},
        "--lr-warmup-iters 10 must be below the 10 iterations of decay",
    ),
    "two warm-ups": (
        {"--lr-warmup-iters": "1", "--lr-warmup-fraction": "0.1"},
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters 1: give one of them",
    ),
    "a warm-up of everything": ({"--lr-warmup-fraction": "1.0"}, "--lr-warmup-fraction 1.0 must be in [0, 1)"),
    "experts with a bias": (
        {"--num-experts": "4"},
        "--num-experts 4 needs --disable-bias-linear: megatron-core's local experts have no working bias",
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
    "no length": ({"--train-iters": ""}, "--train-iters is missing: give the number of iterations"),
    "an embedding's learning rate with swapped ends": (
        {"--decoupled-lr": "0.1", "--decoupled-min-lr": "0.2"},
        "--decoupled-min-lr 0.2 is above --decoupled-lr 0.1",
    ),
    "half of an embedding's learning rate": (
        {"--decoupled-min-lr": "0.1"},
        "--decoupled-min-lr 0.1 needs --decoupled-lr",
    ),
    "gradients in another precision than the model's": (
        {"--grad-reduce-in-bf16": None},
        "--grad-reduce-in-bf16 needs --bf16: gradients of other models are reduced in the model's own precision",
    ),
    "gradients in two precisions": (
        {"--bf16": None, "--grad-reduce-in-bf16": None, "--accumulate-allreduce-grads-in-fp32": None},
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32: give one of them",
    ),
    "fp8 without a GPU": (
        {"--fp8-format": "hybrid", "--transformer-impl": "transformer_engine"},
        "--fp8-format hybrid needs a GPU with fp8 arithmetic, and torch finds none on this machine: use --bf16",
    ),
    "a setting of fp8 without fp8": (
        {"--fp8-amax-history-len": "1024"},
        "--fp8-amax-history-len needs --fp8-format",
    ),
    "experts computed together without a GPU": (
        {"--num-experts": "4", "--disable-bias-linear": None, "--moe-grouped-gemm": None},
        "--moe-grouped-gemm needs CUDA, because it is a CUDA kernel: leave it out",
    ),
    "a model without positions": (
        {"--no-position-embedding": None},
        "--no-position-embedding needs --position-embedding-type rope: a model without any positions is not supported",
    ),
    "masks within one document": (
        {"--variable-seq-lengths": None, "--reset-attention-mask": None},
        "--reset-attention-mask does not work with --variable-seq-lengths: each sample is one document",
    ),
    "masks that nobody makes": (
        {"--reset-attention-mask": None, "--no-create-attention-mask-in-dataloader": None},
        "--no-create-attention-mask-in-dataloader and --reset-attention-mask, which needs masks: give one of them",
    ),
    "a sharded optimizer that is not Adam": (
        {"--optimizer": "sgd", "--use-distributed-optimizer": None},
        "--use-distributed-optimizer needs --optimizer adam: megatron-core does not shard sgd",
    ),
    "an optimizer that cannot be inverted": (
        {
            "--zero-bubble": None, "--zero-bubble-post-validation": None, "--zero-bubble-rollback": "inverse",
            "--optimizer": "sgd",
        },
        "--zero-bubble-rollback inverse: only AdamW can be inverted, and --optimizer is sgd: use snapshot",
    ),
    "a momentum that never ends": ({"--sgd-momentum": "1"}, "--sgd-momentum must be in [0, 1), got 1.0"),
    "two precisions": ({"--bf16": None, "--fp16": None}, "--bf16 and --fp16: give one of them"),
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
    "no vocabulary": (
        {"--vocab-size": ""},
        "--tokenizer-type NullTokenizer (or --mock-data) needs --vocab-size",
    ),
    "no tokenizer": (
        {"--mock-data": "", "--data-path": "corpus"},
        "--tokenizer-type is missing: HuggingFaceTokenizer, for example",
    ),
    "no tokenizer file": (
        {"--tokenizer-type": "HuggingFaceTokenizer"},
        "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model",
    ),
    "a window in torch's fused attention": (
        {"--window-size": "4,0", "--attention-backend": "flash"},
        "--attention-backend flash: torch's fused attention does not compute --window-size: give --attention-backend "
        "local",
    ),
    "an offset of the softmax in torch's fused attention": (
        {"--softmax-type": "learnable", "--attention-backend": "fused"},
        "--attention-backend fused: torch's fused attention does not compute --softmax-type: give --attention-backend "
        "local",
    ),
    "nowhere to save": ({"--save-interval": "5"}, "--save-interval needs --save FOLDER"),
}  # fmt: skip
DATA = "give the data once: --data-path PREFIX, or --train-data-path PREFIX (and --valid-data-path), or --mock-data"
MISTAKES |= {
    "no data": ({"--mock-data": ""}, DATA),
    "data twice": ({"--data-path": "corpus"}, DATA),
    "data three times": ({"--data-path": "corpus", "--train-data-path": "corpus"}, DATA),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_that_names_flags_and_values(changes, message):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked(changes)
    assert str(error.value) == message
