"""Flags of batches, precision, optimizer, attention and data that contradict each other are refused in one line."""

from __future__ import annotations

import pytest

from tests.checked_flags import refusal

MISTAKES = {
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
    "states that are on the host already": (
        {"--optimizer-cpu-offload": None},
        "--optimizer-cpu-offload needs a GPU, because on a CPU the optimizer's states are on the host: leave it out",
    ),
    "documents apart in attention that knows no mask": (
        {"--reset-attention-mask": None, "--transformer-impl": "transformer_engine"},
        "--reset-attention-mask needs --transformer-impl local: attention of transformer_engine ignores "
        "the mask, and is always causal",
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
    assert refusal(changes) == message
