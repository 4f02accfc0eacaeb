"""The settings of a job's pipeline, made once from the flags of the trainer or of a Megatron-LM script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.zero_bubble.job.environment import check_environment
from megatron.zero_bubble.job.flags import check_zero_bubble_flags
from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.job.layers import needed_layout, partition_of_flags
from megatron.zero_bubble.job.plans import check_plan, choose_placement, choose_plan
from megatron.zero_bubble.job.post_validation_flags import check_post_validation
from megatron.zero_bubble.job.profiling import check_memory_limit, planning_options
from megatron.zero_bubble.job.stalls import check_stall_timeout
from megatron.zero_bubble.mcore.transformer_engine import check_transformer_engine
from megatron.zero_bubble.runtime.replanner import PlanningOptions
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.model_costs import Partition
from megatron.zero_bubble.schedule.plan import Plan


@dataclass(frozen=True)
class JobSettings:
    """The checked settings of a job's pipeline.

    Attributes:
        flags: the given flags, with the layout that megatron-core needs for the partition.
        plan: makes the schedules; None for megatron-core's own schedule.
        placement: which rank holds which stages.
        partition: the layers of every stage, in model order.
        planning: how costs are measured and used for planning; None if neither is done.
        is_placement_chosen: whether we choose the placement, so that no number may depend on where a layer lies.
    """

    flags: JobFlags
    plan: Plan | None
    placement: Placement
    partition: Partition
    planning: PlanningOptions | None
    is_placement_chosen: bool = False

    @property
    def seeds_by_layer(self) -> bool:
        """Whether initial weights and dropout are drawn from seeds of layers and not from seeds of ranks."""
        return self.is_placement_chosen or self.flags.zero_bubble_seed_by_layer

    @property
    def log_rank(self) -> int:
        """The global rank that prints the log line: the last of those that compute the loss.

        In megatron-core's order of ranks the pipeline is outermost.
        """
        ranks_per_stage = self.flags.world_size // self.placement.num_ranks
        return (self.placement.rank_of(self.placement.num_stages - 1) + 1) * ranks_per_stage - 1


def job_settings(flags: JobFlags, environment: Mapping[str, str], has_cuda: bool) -> JobSettings:
    """Choose the plan and the placement of stages, and check the flags.

    Every rank gets the same result without communication.

    Raises:
        ValueError: the first flag or setting that cannot work, in one line.
    """
    check_zero_bubble_flags(flags)
    plan = choose_plan(flags)
    placement = choose_placement(flags, plan)
    partition = partition_of_flags(flags, placement)
    flags = replace(flags, pipeline_model_parallel_layout=needed_layout(flags, placement, partition))
    check_plan(flags, plan)
    check_memory_limit(flags, has_cuda)
    check_post_validation(flags)
    planning = planning_options(flags, placement) if plan is not None else None
    check_stall_timeout(flags)
    check_environment(flags, environment, has_cuda)
    return JobSettings(flags, plan, placement, partition, planning)


def check_implementation(flags: JobFlags) -> None:
    """Raise `ValueError` if the package of `--transformer-impl` is missing or too old to defer weight gradients."""
    if flags.transformer_impl == "transformer_engine":
        try:
            check_transformer_engine()
        except ValueError as error:
            raise ValueError(f"--transformer-impl transformer_engine: {error}: use local") from error
