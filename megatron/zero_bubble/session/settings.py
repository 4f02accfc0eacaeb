"""The settings of a job's pipeline, made once from the flags of the trainer or of a Megatron-LM script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.zero_bubble.mcore.transformer_engine import check_transformer_engine
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.plan_report import PlanningOptions
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.hierarchy import Hierarchy
from megatron.zero_bubble.schedule.model_costs import Partition
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.environment import check_environment
from megatron.zero_bubble.session.features import check_post_validation, check_sharding, hierarchy_of
from megatron.zero_bubble.session.flags import check_zero_bubble_flags
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import chunks_of_flags, needed_layout, partition_of_flags, spread_layers
from megatron.zero_bubble.session.layout_choice import ChosenLayout, check_unit_costs_output, is_layout_open
from megatron.zero_bubble.session.plans import check_number, choose_placement, choose_plan
from megatron.zero_bubble.session.profiled_costs import partition_of_profile
from megatron.zero_bubble.session.profiling import check_memory_limit, given_profile, planning_options
from megatron.zero_bubble.session.stalls import check_stall_timeout


@dataclass(frozen=True)
class JobSettings:
    """The checked settings of a job's pipeline.

    Attributes:
        flags: the given flags, with the value of `--pipeline-model-parallel-layout` that the partition needs.
        plan: the `RunSchedules` that makes the schedules; None for megatron-core's own schedule.
        placement: the assignment of the stages to the ranks.
        partition: the number of layers of every stage, in model order.
        planning: options for measuring costs and planning from costs; the defaults if costs are neither measured nor
            given.
        is_layout_open: whether partition, placement and chunks are still to be chosen.
        hierarchy: group sizes and periods for averaging replicas; None if replicas reduce gradients in every step.
    """

    flags: JobFlags
    plan: RunSchedules | None
    placement: Placement
    partition: Partition
    planning: PlanningOptions = field(default_factory=PlanningOptions)
    is_layout_open: bool = False
    hierarchy: Hierarchy | None = None

    @property
    def first_placement(self) -> Placement:
        """The placement for the process groups at start-up: a linear placement if the layout is not chosen yet."""
        return Placement("linear", self.placement.num_ranks) if self.is_layout_open else self.placement

    @property
    def log_rank(self) -> int:
        """The global rank that prints the log line: the last of the ranks that compute the loss.

        In megatron-core's order of global ranks, the pipeline rank varies slowest.
        """
        ranks_per_stage = self.flags.world_size // self.placement.num_ranks
        return (self.placement.rank_of(self.placement.num_stages - 1) + 1) * ranks_per_stage - 1


def job_settings(
    flags: JobFlags,
    environment: Mapping[str, str],
    has_cuda: bool,
    *,
    chooses_layout: bool = False,
    choice: ChosenLayout | None = None,
) -> JobSettings:
    """Choose the plan and the placement of stages, and check the flags.

    Every rank gets the same settings without communication. `job_settings` makes no schedules.

    Args:
        chooses_layout: whether the caller chooses a layout before a model is built, if the flags fix no layout.
        choice: the chosen layout, which replaces the layout of the flags. If the layout was chosen from costs, the
            first plan is also made from these costs.

    Raises:
        ValueError: a flag or setting is refused; the one-line message names the first such flag or setting.
    """
    if choice is not None:
        flags = replace(flags, **choice.flags)
        flags = replace(flags, model_chunks=chunks_of_flags(flags))
    check_zero_bubble_flags(flags)
    plan = choose_plan(flags)
    placement = choose_placement(flags, plan)
    is_open = chooses_layout and is_layout_open(flags)
    if chooses_layout:
        check_unit_costs_output(flags)
    if is_open:
        partition = spread_layers(flags.num_layers, placement.num_stages, flags.hybrid_layer_pattern)
    else:
        partition = partition_of_flags(flags, placement)
        flags = replace(flags, pipeline_model_parallel_layout=needed_layout(flags, placement, partition))
    if plan is not None:
        check_number(flags, plan)
    check_sharding(flags, is_layout_open=is_open)
    check_memory_limit(flags, has_cuda)
    check_post_validation(flags)
    check_stall_timeout(flags)
    check_environment(flags, environment, has_cuda)
    settings = JobSettings(flags, plan, placement, partition, is_layout_open=is_open, hierarchy=hierarchy_of(flags))
    return settings if plan is None else _with_planning(settings, plan, choice)


def _with_planning(settings: JobSettings, plan: RunSchedules, choice: ChosenLayout | None) -> JobSettings:
    """Return `settings` with the options for profiling and planning, and with the costs of `choice` in the plan."""
    flags, request = settings.flags, None if choice is None else choice.request
    profile = given_profile(flags)
    if profile is not None and choice is not None and not _is_of_layout(profile, settings):
        profile = None
    if request is not None:
        known = {name: getattr(request, name) for name in ("costs", "memory_limit", "spread", "time_between")}
        plan = plan.requesting(**known)
    chooses_layout = settings.is_layout_open or choice is not None
    planning = planning_options(
        flags, settings.placement, settings.partition, chooses_layout=chooses_layout, profile=profile
    )
    if choice is not None:
        planning = replace(planning, limits=flags.zero_bubble_layout_limits, megatrons=choice.megatrons)
    if flags.zero_bubble_schedule is None:
        is_own_layout = choice is None or choice.is_megatrons_split
        can_compare = is_own_layout and not flags.interlocks_iterations and not settings.is_layout_open
        planning = replace(planning, tries_own_order=can_compare)
    return replace(settings, plan=plan, planning=planning)


def _is_of_layout(profile: Profile, settings: JobSettings) -> bool:
    """Whether a profile was measured with the job's placement, partition, recomputation and vocabulary shards."""
    flags = settings.flags
    return (
        (profile.placement, partition_of_profile(profile)) == (settings.placement, settings.partition)
        and any(profile.costs.time_r) == (flags.recompute is not Recompute.NONE)
        and profile.costs.has_vocabulary == flags.vocabulary_parallel
    )


def check_implementation(transformer_impl: str) -> None:
    """Raise `ValueError` if the package of `--transformer-impl` is missing or too old to defer weight gradients."""
    if transformer_impl == "transformer_engine":
        try:
            check_transformer_engine()
        except ValueError as error:
            raise ValueError(f"--transformer-impl transformer_engine: {error}: use local") from error
