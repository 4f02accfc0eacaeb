# The flags of a training of MODEL under SCHEDULE, as bash arrays. Scripts source this file.
#
# MODEL is a file of models/ (such as 1.5b) or a path. SCHEDULE is a name in docs/schedules.md, or megatron-core or
# megatron-core-interleaved for megatron-core's own unchanged schedules.

[[ $MODEL == */* ]] && source "$MODEL" || source "examples/slurm/models/$MODEL.sh"

# Transformer Engine's layers if it is installed; otherwise megatron-core's local layers, with torch's fused attention.
if [[ -z ${TRANSFORMER_IMPL:-} ]]; then
    TRANSFORMER_IMPL=local
    if python -c 'import importlib.metadata; importlib.metadata.version("transformer-engine")' 2>/dev/null; then
        TRANSFORMER_IMPL=transformer_engine
    fi
fi

# As in the paper's models, sequences have 1024 tokens, and embedding and loss each take the place of one layer.
GPT_MODEL_ARGS+=(
    --seq-length "${SEQ_LENGTH:-1024}"
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --transformer-impl "$TRANSFORMER_IMPL"
)
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --lr 1.5e-4
    --min-lr 1.5e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
MODEL_PARALLEL_ARGS=(--pipeline-model-parallel-size "$PIPELINE_SIZE")
SCHEDULE_ARGS=(--zero-bubble-schedule "$SCHEDULE")
INTERLEAVED_ARGS=(--num-virtual-stages-per-pipeline-rank "$CHUNKS")
case $SCHEDULE in
    megatron-core) SCHEDULE_ARGS=() ;;
    megatron-core-interleaved) SCHEDULE_ARGS=("${INTERLEAVED_ARGS[@]}") ;;
    interleaved-*) SCHEDULE_ARGS+=("${INTERLEAVED_ARGS[@]}") ;;
esac
if [[ -n ${DATA_PATH:-} ]]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --data-cache-path "${DATA_CACHE_PATH:-.cache/index}"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?the tokenizer.json that made DATA_PATH}"
    )
else
    DATA_ARGS=(--mock-data --vocab-size "${VOCAB_SIZE:-50257}")
fi
