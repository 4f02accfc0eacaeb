# A model for two nodes of two CPU ranks: two layers a stage, at the ends one.
GPT_MODEL_ARGS=(--num-layers 6 --hidden-size 32 --num-attention-heads 4)
PIPELINE_SIZE=4
CHUNKS=2
MICRO_BATCH_SIZE=1
NUM_MICROBATCHES=8
SEQ_LENGTH=16
