"""Pipelines of plain PyTorch layers: `Pipeline` splits them over ranks and trains them; uses no megatron-core."""
