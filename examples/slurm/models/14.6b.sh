# 14.6B parameters on 16 GPUs.
GPT_MODEL_ARGS=(--num-layers 46 --hidden-size 5120 --num-attention-heads 40)
PIPELINE_SIZE=16
CHUNKS=3
MICRO_BATCH_SIZE=1
NUM_MICROBATCHES=${NUM_MICROBATCHES:-64}
