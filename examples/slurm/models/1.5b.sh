# 1.5B parameters on 8 GPUs.
GPT_MODEL_ARGS=(--num-layers 22 --hidden-size 2304 --num-attention-heads 24)
PIPELINE_SIZE=8
CHUNKS=3
MICRO_BATCH_SIZE=6
NUM_MICROBATCHES=${NUM_MICROBATCHES:-32}
