"""Runs an unmodified Megatron-LM training script with schedules of ours."""
