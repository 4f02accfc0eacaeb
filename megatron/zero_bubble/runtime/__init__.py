"""Runs the operations of one pipeline rank; this package imports torch, but not megatron-core."""
