"""Runs an unmodified Megatron-LM training script with a zero-bubble schedule."""
