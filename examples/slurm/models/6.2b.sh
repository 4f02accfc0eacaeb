# 6.2B parameters on 8 GPUs.
GPT_MODEL_ARGS=(--num-layers 30 --hidden-size 4096 --num-attention-heads 32)
PIPELINE_SIZE=8
CHUNKS=4
MICRO_BATCH_SIZE=3
NUM_MICROBATCHES=${NUM_MICROBATCHES:-32}
