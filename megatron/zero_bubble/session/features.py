"""Checks that the flags of optional features are complete and consistent. The module imports no megatron.core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.zero_bubble.mcore.refusals import refuse_with_features, works_with
from megatron.zero_bubble.mcore.refused_settings import Feature
from megatron.zero_bubble.mcore.vocabulary_size import check_vocabulary_size, divides
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import Placement, iteration_time, with_post_validation
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.hierarchy import Hierarchy
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.aliases import DEFAULT_WINDOW
from megatron.zero_bubble.session.flags import SCHEDULE_FILE, flag_name
from megatron.zero_bubble.session.job_flags import JobFlags

if TYPE_CHECKING:
    from megatron.zero_bubble.planner.prediction import Prediction

HIERARCHICAL_SGD, WARMUP = Feature.HIERARCHICAL_SGD.value, flag_name("hierarchical_sgd_warmup")


def hierarchy_of(flags: JobFlags) -> Hierarchy | None:
    """The hierarchy in which replicas average their parameters; None without `--hierarchical-sgd`.

    Raises:
        ValueError: a flag of hierarchical SGD is malformed, or does not fit the job's replicas or another flag; the
            message is one line.
    """
    text, warmup = flags.hierarchical_sgd, flags.hierarchical_sgd_warmup
    if warmup < 0:
        raise ValueError(f"{WARMUP} must be at least 0, got {warmup}")
    if text is None:
        if warmup:
            raise ValueError(f"{WARMUP} {warmup} needs {HIERARCHICAL_SGD}")
        return None
    try:
        hierarchy = Hierarchy.parse(text, warmup)
    except ValueError as error:
        raise ValueError(f"{HIERARCHICAL_SGD} {text}: {error}") from error
    if (replicas := flags.data_parallel_size) == 1:
        raise ValueError(
            f"{HIERARCHICAL_SGD} {text} needs several data-parallel replicas, and {flags.world_size} ranks make one: "
            "start more ranks, or leave the flag out"
        )
    if hierarchy.num_replicas != replicas:
        raise ValueError(
            f"{HIERARCHICAL_SGD} {text} ends with groups of {hierarchy.num_replicas}, and the job has {replicas} "
            f"data-parallel replicas: the last group must be all of them, as in {replicas}:{replicas}"
        )
    refuse_with_features(flags, [Feature.HIERARCHICAL_SGD])
    return hierarchy


def takes_makespan(flags: JobFlags, name: str) -> bool:
    """The value of `PlanRequest.takes_makespan` for the schedule `name`: True for `auto` or with planned recomputation.

    Other schedules keep their published order of operations. No published order has planned recomputation.
    """
    return name == "auto" or flags.recompute is Recompute.PLANNED


def plans_offload(flags: JobFlags) -> bool:
    """Whether the schedule may copy activations to the host."""
    return flags.zero_bubble_offload == "auto"


def check_offload(flags: JobFlags) -> None:
    """Raise `ValueError` if `--zero-bubble-offload auto` lacks a needed flag or contradicts another flag."""
    if not plans_offload(flags):
        return
    given = Feature.OFFLOAD.value
    if flags.zero_bubble_memory_limit is None:
        raise ValueError(f"{given} needs --zero-bubble-memory-limit: without a limit nothing has to leave the device")
    if flags.zero_bubble_schedule is not None and flags.zero_bubble_schedule.startswith(SCHEDULE_FILE):
        raise ValueError(
            f"{given} plans a schedule, but --zero-bubble-schedule {flags.zero_bubble_schedule} gives one: "
            "leave one of them out"
        )
    if (flags.zero_bubble_profile_iters or DEFAULT_WINDOW)[1] == 0 and flags.zero_bubble_profile_input is None:
        raise ValueError(
            f"{given} needs measured copies, and --zero-bubble-profile-iters 0 0 measures none: give another "
            "START END, or --zero-bubble-profile-input FILE"
        )
    check_copies(flags, given)


def check_copies(flags: JobFlags, given: str) -> None:
    """Raise `ValueError` for a flag that does not work with copies of activations, which `given` asks for."""
    if flags.zero_bubble_microbatch_order == "planned":
        raise ValueError(
            f"{given} and --zero-bubble-microbatch-order planned: leave one out, because orders cannot be "
            "planned together with copies"
        )
    if flags.use_torch_fsdp2:
        raise ValueError(f"{given}: it would copy the parameters that --use-torch-fsdp2 gathers: leave one out")
    refuse_with_features(flags, [Feature.OFFLOAD])


def check_pairs(flags: JobFlags) -> None:
    """Raise `ValueError` for a flag that does not work with schedules that run F and B as one operation."""
    if not flags.overlap_moe_expert_parallel_comm:
        return
    given = flag_name("overlap_moe_expert_parallel_comm")
    if flags.mtp_num_layers and not flags.untie_embeddings_and_output_weights:
        raise ValueError(
            f"{given} with --mtp-num-layers {flags.mtp_num_layers} would add the gradients of a weight that embedding "
            "and output layer share in another order, and round them differently: give "
            "--untie-embeddings-and-output-weights or leave one of the two flags out"
        )
    if flags.pairs and flags.zero_bubble_replan_threshold > 0:
        raise ValueError(
            f"{given} runs a forward and a backward as one operation, whose times --zero-bubble-replan-threshold "
            f"{flags.zero_bubble_replan_threshold} cannot compare: leave one of them out"
        )


POST_VALIDATION = Feature.POST_VALIDATION.value
_WORTH_ADVICE = 0.02
"""Smallest gain from post-validation that a job mentions."""
INVERSE, USE_SNAPSHOT = "--zero-bubble-rollback inverse", "use snapshot"


def check_post_validation(flags: JobFlags) -> None:
    """Raise `ValueError` for a flag that post-validation does not support; the message states the reason."""
    if not flags.zero_bubble_post_validation:
        return
    refuse_with_features(flags, [Feature.POST_VALIDATION])
    if flags.zero_bubble_rollback == "inverse" and flags.optimizer != "adam":
        raise ValueError(f"{INVERSE}: only AdamW can be inverted, and --optimizer is {flags.optimizer}: {USE_SNAPSHOT}")


def gain_of_post_validation(flags: JobFlags, plan: RunSchedules) -> str:
    """A log line with the speedup from post-validation, simulated for the plan's schedule with F = B = W."""
    schedule = plan.schedule(flags.most_microbatches)
    costs = default_costs(schedule.placement)
    without, with_it = (iteration_time(s, costs) for s in (schedule, with_post_validation(schedule, costs)))
    gain = 1 - with_it / without
    if gain < 0.001:
        reason = "its ranks end an iteration at the same time"
        return f" > {POST_VALIDATION} gains nothing with schedule {schedule.name}: {reason}"
    awaited = awaited_by_the_first_stage(flags, schedule.placement)
    text = f" > {POST_VALIDATION}: an iteration of schedule {schedule.name} is {gain:.1%} shorter with equal F, B and W"
    return text if awaited is None else f"{text}; but the first stage waits for the last, because {awaited}"


def advice_on_post_validation(flags: JobFlags, prediction: Prediction) -> str | None:
    """A log line that recommends post-validation to a job that would gain at least 2% from it; otherwise None.

    With post-validation, an iteration takes the longest span of a rank in place of the makespan.
    """
    timeline, features = prediction.timeline, (Feature.POST_VALIDATION, Feature.SCRIPT_POST_VALIDATION)
    gain = 1 - timeline.cost / timeline.makespan
    if (
        gain < _WORTH_ADVICE
        or flags.zero_bubble_post_validation
        or flags.hierarchical_sgd is not None
        or timeline.costs.has_vocabulary
        or awaited_by_the_first_stage(flags, timeline.schedule.placement) is not None
        or not all(works_with(flags, feature) for feature in features)
    ):
        return None
    return f" > with {POST_VALIDATION}, which needs memory for a snapshot, an iteration would be {gain:.1%} shorter"


def awaited_by_the_first_stage(flags: JobFlags, placement: Placement) -> str | None:
    """The reason why the optimizer step of the first stage waits for the last stage's rank; None if it does not wait.

    Iterations cannot overlap if the first stage waits for the last stage.
    """
    if placement.kind == "v":
        return None  # The first and the last stage are on one rank.
    if not flags.untie_embeddings_and_output_weights or flags.mtp_num_layers is not None:
        return "the gradients of the embedding are summed over both"
    if flags.calculate_per_token_loss:
        return "--calculate-per-token-loss needs the number of tokens from the last"
    return None


def check_sharding(flags: JobFlags, *, is_layout_open: bool) -> None:
    """Check `--zero-bubble-vocabulary-parallel` before the size of the vocabulary is known.

    Raises:
        ValueError: `--zero-bubble-vocabulary-parallel` does not work with another flag.
    """
    value = flags.zero_bubble_vocabulary_parallel
    given = f"{flag_name('zero_bubble_vocabulary_parallel')} {value}"
    if value == "auto" and not is_layout_open:
        raise ValueError(f"{given} needs a layout that zero bubble chooses, but other flags fix it: use on or off")
    if value == "on":
        refuse_with_features(flags, [Feature.VOCABULARY_SHARDS])


def check_shards(flags: JobFlags, padded_vocab_size: int) -> None:
    """If the flags ask for vocabulary shards, check that the vocabulary divides evenly among the ranks.

    Raises:
        ValueError: the vocabulary does not divide into shards; the message names a value of
            `--make-vocab-size-divisible-by` that works.
    """
    if flags.vocabulary_parallel:
        ranks = flags.pipeline_model_parallel_size, flags.tensor_model_parallel_size
        check_vocabulary_size(padded_vocab_size, *ranks, flags.make_vocab_size_divisible_by)


def may_spread(flags: JobFlags, padded_vocab_size: int) -> bool | None:
    """Whether all layouts in the search have vocabulary shards; None to compare layouts with and without shards."""
    if flags.zero_bubble_vocabulary_parallel in ("on", "off"):
        return flags.vocabulary_parallel
    ranks = flags.pipeline_model_parallel_size, flags.tensor_model_parallel_size
    excludes_shards = flags.use_torch_fsdp2 or flags.mtp_num_layers or flags.variable_seq_lengths
    return None if divides(padded_vocab_size, *ranks) and not excludes_shards else False
