#!/usr/bin/env bash
# Trains the model of examples/pretrain_sample.sh in turn with megatron-core's 1F1B, with megatron-core's interleaved
# schedule and with --zero-bubble, and compares times and losses. Flags of `zero-bubble benchmark` may follow, such as
# --rounds 5.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/sample_model.sh

exec python -m benchmarks.train --pipeline-size "$PIPELINE_SIZE" --num-microbatches "$NUM_MICROBATCHES" \
    --peers megatron-core --schedule chosen --losses --rounds 2 --warmup 15 --iterations 10 "$@" -- \
    "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}"
