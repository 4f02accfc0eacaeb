"""Pipelines of plain PyTorch layers, without megatron-core: `Pipeline` trains layers that are split over ranks."""
