"""The trainer behind `pretrain_gpt.py`: arguments, data, model, loop, checkpoints, logging."""
