"""The trainer of `pretrain_gpt.py`: flags, data, model, training loop, checkpoints and logging."""

import megatron.zero_bubble.mcore  # noqa: F401  # must precede any import of megatron-core
