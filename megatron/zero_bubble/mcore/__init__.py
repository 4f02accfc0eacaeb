"""Contains all code of `megatron.zero_bubble` that touches megatron-core's internals."""

from megatron.zero_bubble.mcore.triton_stand_in import stand_in_for_triton

stand_in_for_triton()
