"""Checks whether a vocabulary divides into equal shards, one per rank.

This module imports neither torch nor megatron.core.
"""

from __future__ import annotations

import math


def divides(padded_vocab_size: int, pipeline_ranks: int, tensor_ranks: int) -> bool:
    """Return whether the vocabulary divides into equal shards, one for each pair of pipeline and tensor rank."""
    return padded_vocab_size % (pipeline_ranks * tensor_ranks) == 0


def check_vocabulary_size(
    padded_vocab_size: int, pipeline_ranks: int, tensor_ranks: int, divisible_by: int = 128
) -> None:
    """Check that the padded vocabulary can be cut into equal shards.

    Args:
        divisible_by: the value of `--make-vocab-size-divisible-by`.

    Raises:
        ValueError: equal shards are impossible; the message names a value of `divisible_by` that allows equal shards.
    """
    if not divides(padded_vocab_size, pipeline_ranks, tensor_ranks):
        raise ValueError(
            f"--zero-bubble-vocabulary-parallel on: a padded vocabulary of {padded_vocab_size} does not divide into "
            f"shards for {pipeline_ranks} pipeline x {tensor_ranks} tensor ranks: --make-vocab-size-divisible-by "
            f"{math.lcm(divisible_by, pipeline_ranks)} makes it do so"
        )
