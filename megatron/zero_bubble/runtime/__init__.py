"""Runs one rank's operations; uses torch, but nothing of megatron-core."""
