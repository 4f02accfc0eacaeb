"""Reads `--hierarchical-sgd`, and refuses what it does not work with. Imports no megatron.core."""

from __future__ import annotations

from megatron.zero_bubble.job.flags import flag_name
from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.schedule.hierarchy import Hierarchy

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
    for reason, is_so in _reasons(flags).items():
        if is_so:
            raise ValueError(f"{FLAG} does not work with {reason}")
    return hierarchy


def _reasons(flags: JobFlags) -> dict[str, bool]:
    """What the method does not work with, and whether the job has it."""
    experts = flags.expert_model_parallel_size
    return {
        "--use-distributed-optimizer: each replica keeps a shard of the others' parameters, so none can step alone; "
        "leave it out": flags.use_distributed_optimizer,
        f"--expert-model-parallel-size {experts}: replicas share experts, so none can step alone; use 1": experts > 1,
        "--fp16: every replica would have a loss scale of its own; use --bf16": flags.fp16,
        "--calculate-per-token-loss: the number of tokens is summed over replicas in every step; leave it out": (
            flags.calculate_per_token_loss
        ),
    }


def _example(replicas: int) -> str:
    """Levels that fit a number of replicas."""
    sizes = [size for size in range(2, replicas + 1) if replicas % size == 0]
    levels = [sizes[0]]
    for size in sizes[1:]:
        if size % levels[-1] == 0:
            levels.append(size)
    return ",".join(f"{size}:{size}" for size in levels)
