"""Running one rank's operations: torch, but nothing of megatron-core."""
