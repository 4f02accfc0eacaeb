"""A trainer of the tests' own, which calls megatron-core the way Megatron-LM's `megatron.training` does."""
