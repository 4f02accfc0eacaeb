"""Checks whether a job's embedding and output layer can be spread over all pipeline ranks."""

from __future__ import annotations

from megatron.zero_bubble.mcore.compatibility.compatibility_table import refuse_with_features
from megatron.zero_bubble.mcore.compatibility.setting_rows import Feature
from megatron.zero_bubble.mcore.vocabulary_size import check_vocabulary_size, divides
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.job_flags import JobFlags


def check_sharding(flags: JobFlags, *, is_layout_open: bool) -> None:
    """Check the flag before the size of the vocabulary is known.

    Raises:
        ValueError: it does not work with another flag.
    """
    value = flags.zero_bubble_vocabulary_parallel
    given = f"{flag_name('zero_bubble_vocabulary_parallel')} {value}"
    if value == "auto" and not is_layout_open:
        raise ValueError(f"{given} chooses with the layout, which other flags fix: use on or off")
    if value == "on":
        refuse_with_features(flags, [Feature.VOCABULARY_SHARDS])


def check_shards(flags: JobFlags, padded_vocab_size: int) -> None:
    """Check that the vocabulary divides into as many shards as there are ranks, if it is spread over them.

    Raises:
        ValueError: it does not; names a divisor that works.
    """
    if flags.vocabulary_parallel:
        ranks = flags.pipeline_model_parallel_size, flags.tensor_model_parallel_size
        check_vocabulary_size(padded_vocab_size, *ranks, flags.make_vocab_size_divisible_by)


def may_spread(flags: JobFlags, padded_vocab_size: int) -> bool | None:
    """Whether a layout that is searched spreads the vocabulary; None if the search may choose."""
    if flags.zero_bubble_vocabulary_parallel in ("on", "off"):
        return flags.vocabulary_parallel
    if flags.use_torch_fsdp2 or flags.overlap_moe_expert_parallel_comm:
        return False
    ranks = flags.pipeline_model_parallel_size, flags.tensor_model_parallel_size
    has_shards = divides(padded_vocab_size, *ranks) and not flags.mtp_num_layers and not flags.variable_seq_lengths
    return None if has_shards else False
