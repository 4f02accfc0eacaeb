"""What each setting of megatron-core and Megatron-LM means for a zero-bubble schedule. Imports no megatron-core."""
