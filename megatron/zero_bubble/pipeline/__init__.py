"""Pipelines of plain PyTorch layers, without megatron-core: `Pipeline` splits layers over ranks and trains them."""
