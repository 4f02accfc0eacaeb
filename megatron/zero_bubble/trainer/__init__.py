"""The trainer behind `pretrain_gpt.py`: flags, data, model, loop, checkpoints and logging."""

import megatron.zero_bubble.mcore  # noqa: F401  # lets the modules of this package import megatron-core
