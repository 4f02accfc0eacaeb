#!/usr/bin/env bash
# Trains a small GPT on the sample text with a zero-bubble pipeline; runs on two CPU cores or on GPUs.
# More flags may follow: examples/pretrain_sample.sh --train-iters 20 --zero-bubble-schedule zb-h2
# PIPELINE_SIZE=4 examples/pretrain_sample.sh trains on four pipeline ranks, whatever the machine has.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/sample_model.sh

MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size "$PIPELINE_SIZE"
    --zero-bubble
)
LENGTH_ARGS=(
    --global-batch-size $((4 * NUM_MICROBATCHES))
    --train-iters 100
)
EVAL_AND_LOGGING_ARGS=(
    --log-interval 5
    --eval-interval 100
    --eval-iters 2
)

echo "starting $PIPELINE_SIZE pipeline ranks, which takes some seconds ..."
exec torchrun --standalone --nproc-per-node "$PIPELINE_SIZE" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${LENGTH_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" "$@"
