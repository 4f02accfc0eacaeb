#!/usr/bin/env bash
# Trains a small GPT on the sample text with four pipeline ranks; runs on two CPU cores or on GPUs.
# More flags may follow: examples/pretrain_sample.sh --train-iters 20 --zero-bubble-schedule zb-h2
set -euo pipefail
cd "$(dirname "$0")/.."

PIPELINE_SIZE=${PIPELINE_SIZE:-4}
SAMPLE=.cache/sample

GPT_MODEL_ARGS=(
    --num-layers 8
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters 100
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --weight-decay 0.1
    --clip-grad 1.0
)
MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size "$PIPELINE_SIZE"
    --zero-bubble
)
DATA_ARGS=(
    --data-path "$SAMPLE/stdlib_text_document"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$SAMPLE/tokenizer.json"
    --data-cache-path .cache/index
)
EVAL_AND_LOGGING_ARGS=(
    --log-interval 5
    --eval-interval 100
    --eval-iters 2
)

# One thread a rank: the ranks share the cores of one machine.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec torchrun --standalone --nproc-per-node "$PIPELINE_SIZE" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" "$@"
