"""Reads `--hierarchical-sgd`, and refuses what it does not work with. Imports no megatron.core."""

from __future__ import annotations

from megatron.zero_bubble.mcore.compatibility.compatibility_table import refuse_with_features
from megatron.zero_bubble.mcore.compatibility.setting_rows import Feature
from megatron.zero_bubble.schedule.hierarchy import Hierarchy
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.job_flags import JobFlags

FLAG, WARMUP = flag_name("hierarchical_sgd"), flag_name("hierarchical_sgd_warmup")


def hierarchy_of(flags: JobFlags) -> Hierarchy | None:
    """The hierarchy in which replicas average their parameters; None without `--hierarchical-sgd`.

    Raises:
        ValueError: the flag is malformed, or does not fit the job's replicas or another flag; one line.
    """
    text, warmup = flags.hierarchical_sgd, flags.hierarchical_sgd_warmup
    if warmup < 0:
        raise ValueError(f"{WARMUP} must be at least 0, got {warmup}")
    if text is None:
        if warmup:
            raise ValueError(f"{WARMUP} {warmup} needs {FLAG}")
        return None
    try:
        hierarchy = Hierarchy.parse(text, warmup)
    except ValueError as error:
        raise ValueError(f"{FLAG} {text}: {error}") from error
    replicas = flags.data_parallel_size
    if replicas == 1:
        raise ValueError(
            f"{FLAG} {text} needs several data-parallel replicas, and {flags.world_size} ranks make one: start more "
            "ranks, or leave the flag out"
        )
    if hierarchy.num_replicas != replicas:
        raise ValueError(
            f"{FLAG} {text} ends with groups of {hierarchy.num_replicas}, and the job has {replicas} data-parallel "
            f"replicas: the last group must be all of them, as in {_example(replicas)}"
        )
    refuse_with_features(flags, [Feature.HIERARCHICAL_SGD])
    return hierarchy


def _example(replicas: int) -> str:
    """Levels that fit a number of replicas."""
    sizes = [size for size in range(2, replicas + 1) if replicas % size == 0]
    levels = [sizes[0]]
    for size in sizes[1:]:
        if size % levels[-1] == 0:
            levels.append(size)
    return ",".join(f"{size}:{size}" for size in levels)
