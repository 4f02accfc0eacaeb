"""The trainer behind `pretrain_gpt.py`: flags, data, model, loop, checkpoints and logging."""
