#!/usr/bin/env bash
# Estimates memory and speed of a model of the zero-bubble paper (Qi et al. 2024) under each schedule, for the paper's
# machines: nodes of 8 A100 with 80 GB. Flags of zero-bubble estimate may follow, then -- and flags of pretrain_gpt.py:
# MODEL=6.2b examples/estimate_paper.sh --schedule 1f1b --schedule zb-2p -- --zero-bubble --zero-bubble-post-validation
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-1.5b}
source "examples/slurm/models/$MODEL.sh"

# As in the paper's models, sequences have 1024 tokens, embedding and loss each take the place of one layer, and the
# attention scores stay in memory.
GPT_MODEL_ARGS+=(
    --seq-length 1024
    --vocab-size 50257
    --untie-embeddings-and-output-weights
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --fp16
    --transformer-impl transformer_engine
    --attention-backend unfused
)
MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size "$PIPELINE_SIZE"
    --num-virtual-stages-per-pipeline-rank "$CHUNKS"
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$((NUM_MICROBATCHES * MICRO_BATCH_SIZE))"
)
TOOL_ARGS=()
while [[ $# -gt 0 && $1 != -- ]]; do
    TOOL_ARGS+=("$1")
    shift
done
[[ $# -gt 0 ]] && shift

exec zero-bubble estimate --world-size "$PIPELINE_SIZE" "${TOOL_ARGS[@]}" -- \
    "${GPT_MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "$@"
