"""The effect of each setting of megatron-core and Megatron-LM on a zero-bubble schedule. Imports no megatron-core."""
