"""Computes how many rows the embedding has. Imports neither torch nor megatron.core."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.zero_bubble.training.arguments import Arguments


def null_vocab_size(vocab_size: int) -> int:
    """Tokens of megatron-core's NullTokenizer: the numbers below `--vocab-size`, and one that ends a document."""
    return vocab_size + 1


def with_vocabulary(args: Arguments, vocab_size: int) -> Arguments:
    """The flags with `padded_vocab_size` set for a tokenizer of `vocab_size` tokens."""
    size = padded_vocab_size(vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    return replace(args, padded_vocab_size=size)


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """`vocab_size` rounded up as Megatron does it: every tensor-parallel rank gets a multiple of the divisor."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    if vocab_size < 1 or multiple < 1:
        raise ValueError(
            f"vocabulary size {vocab_size}, --make-vocab-size-divisible-by {make_vocab_size_divisible_by} and "
            f"--tensor-model-parallel-size {tensor_model_parallel_size} must be positive"
        )
    return math.ceil(vocab_size / multiple) * multiple
