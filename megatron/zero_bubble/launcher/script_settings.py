"""Reads a script's arguments about its pipeline, and refuses arguments that no zero-bubble schedule supports."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron.zero_bubble.mcore.batch_sizes import has_steps, sizes_of_steps
from megatron.zero_bubble.mcore.refusals import refuse_with_features, refuse_with_schedule
from megatron.zero_bubble.mcore.refused_settings import Feature
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.features import plans_offload
from megatron.zero_bubble.session.flags import CHUNK_FLAGS, flag_name
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import chunks_of_flags, spread_layers
from megatron.zero_bubble.session.reports import print_line
from megatron.zero_bubble.session.start_up import SessionError

if TYPE_CHECKING:
    from megatron.zero_bubble.launcher.command_line import LaunchFlags

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""The script's arguments for a layer pattern; Megatron-LM copies `hybrid_override_pattern` to
`hybrid_layer_pattern`."""
CHUNK_SOURCES = (*CHUNK_FLAGS, "pipeline_model_parallel_layout", PATTERNS[0])
"""Arguments that may ask for several model chunks a rank."""
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
AT_OPTIMIZER_STEP = ("zero_bubble_post_validation", "hierarchical_sgd")
"""Settings that take effect at the optimizer step of Megatron-LM's trainer."""
_NEED_TRAINER = {
    "zero_bubble_post_validation": "post-validation depends on which steps the loop logs",
    "hierarchical_sgd": "hierarchical SGD depends on when the loop logs, evaluates and saves",
    "zero_bubble_seed_by_layer": "layer seeds are derived from its seed",
}
"""Setting that works only with Megatron-LM's trainer -> reason why no other training loop supports the setting."""
_OVERLAP = "overlap_moe_expert_parallel_comm"
_TAKEN_OVER = "zero_bubble_overlaps_experts"


@contextmanager
def overlap_taken_over(script: Namespace) -> Iterator[None]:
    """Let the zero-bubble schedule, instead of megatron-core, overlap the expert-parallel communication.

    megatron-core itself overlaps the expert-parallel communication only if a rank has several model chunks. The
    script's `--delay-wgrad-compute` is switched off, and after the `with` block `--overlap-moe-expert-parallel-comm`,
    because the zero-bubble schedule itself overlaps the expert-parallel communication and defers W. Inside the `with`
    block, Megatron-LM allows more values of CUDA_DEVICE_MAX_CONNECTIONS with the flag than without the flag.
    """
    if not getattr(script, _OVERLAP, False):
        yield
        return
    setattr(script, _TAKEN_OVER, True)
    script.delay_wgrad_compute = False
    yield
    script.overlap_moe_expert_parallel_comm = False


def switch_off_reruns(script: Namespace) -> None:
    """Let Megatron-LM run no iteration a second time, because post-validation would take the optimizer's step twice.

    With `--rerun-mode validate_results`, the default, Megatron-LM repeats an iteration whose loss is not finite. With
    `--rerun-mode disabled`, such a loss ends the job before the optimizer's step.
    """
    if getattr(script, "rerun_mode", None) == "validate_results":
        script.rerun_mode = "disabled"
        if getattr(script, "rank", 0) == 0:  # before process groups exist
            print_line(f" > {Feature.POST_VALIDATION.value}: --rerun-mode validate_results is set to disabled")


def flags_of(script: Namespace, flags: LaunchFlags, **known: Any) -> JobFlags:
    """Return the flags of the job, made from a script's arguments and the launcher's flags.

    Args:
        script: the result of Megatron-LM's `get_args()`, or arguments that are not validated yet. Flags that `script`
            lacks have the defaults of `JobFlags`.
        known: flags of the job whose values replace the values from the script.
    """
    layout = getattr(script, "pipeline_model_parallel_layout", None)
    ours = {entry.name: getattr(flags, entry.name) for entry in fields(JobFlags) if hasattr(flags, entry.name)}
    pattern = getattr(script, "hybrid_layer_pattern", None)
    in_its_words: dict[str, Any] = {
        "pipeline_model_parallel_layout": None if layout is None else _text_of_layout(layout),
        "model_chunks": getattr(script, "virtual_pipeline_model_parallel_size", None),
        "microbatch_group_size_per_virtual_pipeline_stage": getattr(script, "microbatch_group_size_per_vp_stage", None),
        **_batch_sizes(script),
        _OVERLAP: getattr(script, _OVERLAP, False) or getattr(script, _TAKEN_OVER, False),
    }
    if pattern is not None:
        in_its_words["num_layers"] = len(HybridPattern.parse(pattern).symbols)
    return JobFlags.of(script, **{**in_its_words, **ours, **known})


_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _text_of_layout(layout: Any) -> str:
    """The letters of a layout, which a configuration may also hold as a list of the layer types of each stage."""
    stages = getattr(layout, "input_data", layout)
    if isinstance(stages, str):
        return stages
    names = ((getattr(layer, "name", layer).strip().lower() for layer in stage) for stage in stages)
    return "|".join("".join(_LETTERS.get(name, name) for name in stage) for stage in names)


def _batch_sizes(script: Namespace) -> dict[str, Any]:
    """Return the flags of the job about batch sizes that change during the training."""
    ramp, steps = (getattr(script, name, None) for name in ("rampup_batch_size", "step_batch_size_schedule"))
    if steps is not None:
        return {
            "rampup_batch_size": None,
            "step_batch_sizes": sizes_of_steps(steps),
        }
    return {"rampup_batch_size": None if ramp is None or has_steps() else [int(size) for size in ramp]}


def placement_asked(flags: JobFlags) -> str | None:
    """Return the kind of placement that the placement flag or the schedule gives; None if neither gives one."""
    entry = ENTRIES.get(flags.schedule or "")
    return flags.zero_bubble_placement or (None if entry is None else entry.placement)


def refuse_script_settings(script: Namespace, flags: JobFlags, placement: str | None = None) -> None:
    """Refuse the script's arguments that the schedule or a feature in use does not support.

    Args:
        placement: kind of the placement; by default the kind that the placement flag or the schedule gives, if any.

    Raises:
        ValueError: the schedule or a feature in use does not support one of the script's arguments.
    """
    placement = placement or placement_asked(flags)
    in_use = {
        Feature.POST_VALIDATION: flags.zero_bubble_post_validation,
        Feature.SCRIPT_POST_VALIDATION: flags.zero_bubble_post_validation,
        Feature.HIERARCHICAL_SGD: flags.hierarchical_sgd is not None,
        Feature.VOCABULARY_SHARDS: flags.vocabulary_parallel,
        Feature.PLANNED_RECOMPUTATION: flags.recompute is Recompute.PLANNED,
        Feature.OFFLOAD: plans_offload(flags),
        Feature.V_PLACEMENT: placement == "v",
    }
    refuse_with_schedule(script, schedule_asked(flags))
    refuse_with_features(script, [feature for feature, is_used in in_use.items() if is_used])
    if one_chunk_flag(script) is not None and (asking := chunks_asked(flags)) is not None:
        refuse_chunks(script, asking)


def refuse_in_own_loop(flags: LaunchFlags | JobFlags, names: Iterable[str] = _NEED_TRAINER) -> None:
    """Refuse the settings `names`, which only Megatron-LM's trainer supports, in any other training loop."""
    for name in names:
        if getattr(flags, name):
            raise SessionError(f"{flag_name(name)} works with Megatron-LM's trainer alone: {_NEED_TRAINER[name]}")


def refuse_chunks(script: Namespace, asking: str) -> None:
    """Refuse several model chunks a rank if the script's arguments allow only one.

    Args:
        asking: the flags, or the checkpoint, that ask for several chunks.

    Raises:
        SessionError: the script's arguments allow only one model chunk a rank.
    """
    if (given := one_chunk_flag(script)) is not None:
        raise SessionError(
            f"{asking} does not work with {given}, which Megatron-LM supports with one model chunk a rank only: leave "
            "one of them out"
        )


def one_chunk_flag(script: Namespace) -> str | None:
    """Return the script's flag that allows only one model chunk a rank, and its value; None without such a flag."""
    if skipped := getattr(script, "iterations_to_skip", None):
        return f"--iterations-to-skip {' '.join(map(str, skipped))}"
    if getattr(script, "multiple_validation_sets", False):
        return "--multiple-validation-sets"
    # Megatron-LM takes the length of the first chunk's datasets; with --sft, every stage has datasets.
    is_full = getattr(script, "full_validation", False) and not getattr(script, "sft", False)
    return "--full-validation" if is_full else None


def schedule_asked(flags: JobFlags) -> str:
    """Return the flag that asks for the schedule, and its value."""
    return f"--zero-bubble-schedule {flags.schedule}" if flags.zero_bubble_schedule else "--zero-bubble"


def chunks_asked(flags: JobFlags) -> str | None:
    """Return the flag and value that ask for several model chunks a rank; None if no flag asks for several chunks."""
    entry, kind = ENTRIES.get(flags.zero_bubble_schedule or ""), flags.zero_bubble_placement
    if kind is not None and kind != "linear":
        return f"--zero-bubble-placement {kind}"
    if entry is not None and entry.num_chunks > 1:
        return f"--zero-bubble-schedule {flags.zero_bubble_schedule}"
    if chunks_of_flags(flags) is None:
        return None
    return next(f"{flag_name(name)} {value}" for name in CHUNK_SOURCES if (value := getattr(flags, name)))


def check_chunks(script: Namespace, flags: JobFlags, placement: Placement) -> None:
    """Check that a script builds as many model chunks a rank as the placement has.

    Raises:
        SessionError: the script's number of model chunks differs from the placement's number of model chunks.
    """
    built = script.virtual_pipeline_model_parallel_size or 1
    if placement.num_chunks != built:
        remedy = f"give it --num-virtual-stages-per-pipeline-rank {placement.num_chunks}"
        if flags.pattern is not None:
            remedy = f"give it a --hybrid-layer-pattern of {placement.num_stages} stages, with | between them"
        elif getattr(script, "hybrid_override_pattern", None) is not None:
            remedy = "its hybrid model allows no more than one: choose another schedule"
        raise SessionError(
            f"schedule {flags.schedule} has {placement.num_chunks} model chunks a rank, but the script builds "
            f"{built}: {remedy}"
        )


def divide_pattern(script: Namespace, flags: LaunchFlags) -> None:
    """Insert `|` between the stages of a layer pattern if Megatron-LM's own division does not fit the schedule.

    Megatron-LM divides a pattern without `|` into one stage for each rank, with the same number of layers in every
    stage.

    Raises:
        SessionError: `divide_pattern` has to insert `|` into the layer pattern, but other arguments also set the number
            of layers of a rank.
    """
    entry = ENTRIES.get(flags.zero_bubble_schedule or "")
    num_chunks = 1 if entry is None else entry.num_chunks
    if not hasattr(script, PATTERNS[0]) or not (num_chunks > 1 or flags.allow_padding_num_layers):
        return
    for name in PATTERNS:
        if not (text := getattr(script, name, None)) or (pattern := HybridPattern.parse(text)).is_divided:
            continue
        if any(getattr(script, end, None) is not None for end in _ENDS):
            raise SessionError(
                f"--hybrid-layer-pattern {text}: with {num_chunks} model chunks a rank, the | give the layers of each "
                "stage: leave out --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        num_stages = script.pipeline_model_parallel_size * num_chunks
        setattr(script, name, str(pattern.divided(spread_layers(len(pattern.symbols), num_stages, text))))
