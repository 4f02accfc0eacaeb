# The small GPT that examples/pretrain_sample.sh and examples/compare_sample.sh train on the sample text; both scripts
# source this file. The number of pipeline ranks is a power of two from 2 to 8, according to the number of GPUs or,
# if there are fewer GPUs than ranks, of cores.

devices=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
if ((devices == 1)) && [[ ${PIPELINE_SIZE:-} != 1 && -z ${NCCL_MULTI_RANK_GPU_ENABLE:-} ]]; then
    echo "the ranks run on processor cores, because NCCL needs one GPU for each rank" >&2
    export CUDA_VISIBLE_DEVICES=
    devices=0
fi
((devices > 0)) || devices=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
if [[ -z ${PIPELINE_SIZE:-} ]]; then
    PIPELINE_SIZE=2
    while ((2 * PIPELINE_SIZE <= devices && PIPELINE_SIZE < 8)); do ((PIPELINE_SIZE *= 2)); done
fi
NUM_MICROBATCHES=$((2 * PIPELINE_SIZE))
SAMPLE=.cache/sample

GPT_MODEL_ARGS=(
    --num-layers $((PIPELINE_SIZE > 4 ? 2 * PIPELINE_SIZE : 8))
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
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --clip-grad 1.0
)
DATA_ARGS=(
    --data-path "$SAMPLE/stdlib_text_document"
    --split 95,4,1
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$SAMPLE/tokenizer.json"
    --data-cache-path .cache/index
)

# One thread a rank: the ranks share the cores of one machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
