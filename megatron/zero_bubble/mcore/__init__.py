"""The only code that touches megatron-core's internals."""
