#!/usr/bin/env bash
# Memory and speed of a model of the zero-bubble paper (Qi et al. 2024) under each schedule, estimated for its
# machines: nodes of 8 A100 with 80 GB. Flags of tools/estimate.py may follow, then -- and more of pretrain_gpt.py's:
# MODEL=6.2B examples/estimate_paper.sh --schedule 1f1b --schedule zb-2p -- --zero-bubble --zero-bubble-post-validation
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-1.5B}
# The first and the last stage have a layer less than the others, to make room for the embedding and the loss.
case $MODEL in
    1.5B) LAYERS=22 HEADS=24 HIDDEN=2304 PIPELINE=8 MICRO_BATCH=6 ENDS=2 ;;
    6.2B) LAYERS=30 HEADS=32 HIDDEN=4096 PIPELINE=8 MICRO_BATCH=3 ENDS=3 ;;
    14.6B) LAYERS=46 HEADS=40 HIDDEN=5120 PIPELINE=16 MICRO_BATCH=1 ENDS=2 ;;
    28.3B) LAYERS=62 HEADS=48 HIDDEN=6144 PIPELINE=32 MICRO_BATCH=1 ENDS=1 ;;
    *)
        echo "MODEL=$MODEL is none of 1.5B, 6.2B, 14.6B, 28.3B" >&2
        exit 2
        ;;
esac
MICROBATCHES=${MICROBATCHES:-$((3 * PIPELINE))}

GPT_MODEL_ARGS=(
    --num-layers "$LAYERS"
    --hidden-size "$HIDDEN"
    --num-attention-heads "$HEADS"
    --seq-length 1024
    --vocab-size 50257
    --untie-embeddings-and-output-weights
    --fp16
)
MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size "$PIPELINE"
    --decoder-first-pipeline-num-layers "$ENDS"
    --decoder-last-pipeline-num-layers "$ENDS"
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$((MICROBATCHES * MICRO_BATCH))"
)
TOOL_ARGS=()
while [[ $# -gt 0 && $1 != -- ]]; do
    TOOL_ARGS+=("$1")
    shift
done
[[ $# -gt 0 ]] && shift

exec "${PYTHON:-python}" tools/estimate.py --world-size "$PIPELINE" "${TOOL_ARGS[@]}" -- \
    "${GPT_MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "$@"
