"""The only code that touches the insides of megatron-core."""
