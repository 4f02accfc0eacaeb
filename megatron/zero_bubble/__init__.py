"""Zero-bubble pipeline parallelism for Megatron, as a layer on the unmodified megatron-core."""
