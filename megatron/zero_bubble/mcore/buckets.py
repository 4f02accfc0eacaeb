"""The groups of buckets in which megatron-core's DistributedDataParallel (DDP) reduces gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def bucket_groups(chunk: Any) -> list[Any]:
    """Return the groups of buckets of a model chunk in DDP, including experts' groups; FSDP has no buckets."""
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]


def start_missing_reductions(chunks: Sequence[Any], force_all_reduce: bool | None) -> None:
    """Let DDP reduce the buckets in which a parameter has got no gradient in this step, at the end of the step.

    With `overlap_grad_reduce`, DDP starts the reduction of a bucket when all of its parameters have a gradient. On the
    last stage of a model with tied embeddings and multi-token prediction, one trained weight never gets a gradient.
    """
    for chunk in chunks:
        for group in (group for group in bucket_groups(chunk) if group.ddp_config.overlap_grad_reduce):
            counts, usual = group.per_param_grad_ready_counts, group.golden_per_param_grad_ready_counts
            if group.is_first_batch and len(counts) < len(group.params):
                group.per_param_grad_ready_counts = {}  # DDP waits for no parameter in later steps, too
            elif not group.is_first_batch and counts != usual:
                group.start_grad_sync(force_all_reduce=force_all_reduce)
