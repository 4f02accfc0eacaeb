"""Chooses the layout of a script's model before the model is built, and makes the script build the chosen layout."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_checkpoint import ScriptCheckpoint
from megatron.zero_bubble.launcher.script_settings import (
    check_chunks,
    chunks_asked,
    divide_pattern,
    flags_of,
    one_chunk_flag,
    overlap_taken_over,
    placement_asked,
    refuse_chunks,
    refuse_script_settings,
    switch_off_reruns,
)
from megatron.zero_bubble.launcher.script_stages import ScriptStages
from megatron.zero_bubble.launcher.script_units import ScriptUnits, change_settings
from megatron.zero_bubble.mcore.cpu import refuse_on_cpu
from megatron.zero_bubble.mcore.decoder_models import HYBRID_RECOMPUTES
from megatron.zero_bubble.mcore.refusals import refuse_with_schedule, works_with
from megatron.zero_bubble.mcore.refused_settings import Feature
from megatron.zero_bubble.mcore.unit_costs import UnmeasuredError
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import WITHOUT_PARTITION, partition_of_flags, spread_layers, to_layout
from megatron.zero_bubble.session.layout_choice import SAVED_NAMES, ChosenLayout, is_layout_open, saved_choice
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.session.start_up import SessionError, users_mistakes

_KEEPS_MEGATRONS = (
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    *("is_hybrid_model", "yaml_cfg", "moe_use_upcycling"),
    *("logits_save_dir", "logits_load_dir"),
)
"""Script arguments with which megatron-core cannot build the model from a pipeline layout, or reads the logits of the
last rank."""


def validate_arguments(flags: LaunchFlags, call: Call) -> Any:
    """When `validate_args` is called, refuse unsupported arguments, and allow stages with unequal numbers of layers.

    Stages with unequal numbers of layers are allowed if zero bubble chooses the layout, or with
    `--allow-padding-num-layers`. Under post-validation, reruns of iterations are switched off.

    Megatron-LM refuses a number of layers that the number of stages does not divide, unless the arguments give a
    layout. If Megatron-LM would refuse stages that zero bubble allows, the hook sets the layout before `validate_args`
    runs, and removes the arguments that the layout replaces. If zero bubble chooses the layout, the hook restores the
    previous arguments after `validate_args`.
    """
    with overlap_taken_over(call["args"]):
        return _validate_arguments(flags, call)


def _validate_arguments(flags: LaunchFlags, call: Call) -> Any:
    script = call["args"]
    with users_mistakes():
        _complete_batch(script, call.get("defaults") or {})
        if flags.zero_bubble_cpu and not torch.cuda.is_available():
            refuse_on_cpu(script)
        if flags.zero_bubble_post_validation:
            switch_off_reruns(script)
        divide_pattern(script, flags)
        job = flags_of(script, flags)
        refuse_script_settings(script, job)
        layout = _allowed_layout(script, job) if job.pattern is None else None
    if job.pattern is not None:
        with users_mistakes():  # Megatron-LM's errors describe a wrong pattern
            return call.proceed()
    if layout is None:
        return call.proceed()
    settings = {"pipeline_model_parallel_layout": layout, "num_virtual_stages_per_pipeline_rank": None}
    if not is_layout_open(job):
        settings |= {name: value for name, value in WITHOUT_PARTITION.items() if hasattr(script, name)}
    before = change_settings(script, settings)
    result = call.proceed()
    if is_layout_open(job):
        vars(script).update(before)
    return result


def _complete_batch(script: Namespace, defaults: Mapping[str, Any]) -> None:
    """Set a missing `micro_batch_size` to the default of the script, which Megatron-LM sets in `validate_args`.

    Raises:
        ValueError: neither the arguments nor the defaults give the size of a microbatch.
    """
    if getattr(script, "micro_batch_size", 1) is None:
        script.micro_batch_size = defaults.get("micro_batch_size")
        if script.micro_batch_size is None:
            raise ValueError("--micro-batch-size is missing: give the number of sequences in a microbatch")


@users_mistakes()
def refuse_restarts(call: Call) -> Any:
    """When `inprocess_restart` is called, refuse `--inprocess-restart`."""
    refuse_with_schedule(call["args"], "--zero-bubble")
    return call.proceed()


def _allowed_layout(script: Namespace, job: JobFlags) -> str | None:
    """Return a layout that zero bubble allows and Megatron-LM may refuse; None if Megatron-LM's own layout is kept.

    The layout is the most even layout or, in a V, the layout of `--decoder-first-pipeline-num-layers` and similar
    flags, which Megatron-LM reads for interleaved chunks.
    """
    if not job.num_layers or _other_source(script) is not None:
        return None
    if job.num_layers_per_virtual_pipeline_stage or job.pipeline_model_parallel_layout:
        return None
    num_ranks = job.pipeline_model_parallel_size
    if (
        placement_asked(job) == "v"
        and not is_layout_open(job)
        and any(getattr(job, name) for name in WITHOUT_PARTITION)
    ):
        return to_layout(partition_of_flags(job, Placement("v", num_ranks, 2)), job.mtp_num_layers)
    if not (is_layout_open(job) or job.allow_padding_num_layers):
        return None
    num_stages = num_ranks * (job.num_virtual_stages_per_pipeline_rank or 1)
    if job.num_layers % num_stages == 0:
        return None
    return to_layout(spread_layers(job.num_layers, num_stages), job.mtp_num_layers)


@users_mistakes()
def settle_layout(
    script: Namespace,
    checkpoint: ScriptCheckpoint | None,
    session: Session,
    units: ScriptUnits,
    setup: Call,
    data_provider: Callable[..., Any] | None = None,
) -> bool:
    """Choose each setting of the layout that the flags leave open, before `setup` builds the model; a collective call.

    A job that continues from a checkpoint keeps the checkpoint's layout. Megatron's layout is kept if the script's
    model needs that layout, or if the model's costs cannot be measured.

    Args:
        checkpoint: the checkpoint that the script loads; None if the script loads no checkpoint.
        data_provider: the script's function that makes the datasets; None if it is unknown.

    Returns:
        Whether a layout was chosen or restored; False if Megatron's layout is kept.

    Raises:
        SessionError: no layout fits in the memory, or a flag does not work with the chosen layout.
    """
    if checkpoint is not None and (saved := _saved_choice(checkpoint, session.job)) is not None:
        session.restore_layout(saved, script.load)
        if (num_chunks := session.job.placement.num_chunks) > 1:
            refuse_chunks(script, f"--load {script.load}, whose layout has {num_chunks} model chunks a rank,")
        return True
    if checkpoint is None and getattr(script, "load", None) and _has_local_checkpoint(setup):
        raise SessionError(
            "--non-persistent-ckpt-type local: there is a local checkpoint, but --load has no checkpoint that records "
            "the layout: give the flags that the first job printed below its table of layouts"
        )
    if (reason := _reason_to_keep(script, checkpoint, session.job)) is None:
        try:
            costs = units.measure(setup, session)
        except (SessionError, UnmeasuredError) as error:
            reason = str(error)
    if reason is not None:
        keep_megatrons_layout(script, session, reason)
        return False
    one_chunk = _one_chunk_function(setup, data_provider)
    _refuse_one_chunk(one_chunk, session.job.flags)
    has_chunks = one_chunk is None and one_chunk_flag(script) is None
    restrictions = {} if has_chunks else {"zero_bubble_placement": "linear"}
    spreads = not (units.shapes_vary or units.keeps_vocabulary) and works_with(script, Feature.VOCABULARY_SHARDS)
    if not spreads and not session.job.flags.vocabulary_parallel:
        restrictions["zero_bubble_vocabulary_parallel"] = "off"
    session.choose_layout(costs, script.padded_vocab_size, **restrictions)
    return True


@users_mistakes()
def keep_megatrons_layout(script: Namespace, session: Session, reason: str) -> None:
    """Keep Megatron's layout instead of choosing another layout, and print the reason; a collective call.

    Raises:
        SessionError: a flag does not work with Megatron's layout.
    """
    session.keep_megatrons_layout(reason)
    check_chunks(script, session.job.flags, session.job.placement)


def build_layout(script: Namespace, setup: Call, job: JobSettings, stages: ScriptStages) -> None:
    """Change settings so that `setup_model_and_optimizer` builds the stages of `job`'s layout."""
    placement = job.placement
    for name in (*SAVED_NAMES, "step_batch_sizes", "zero_bubble_memory_limit"):
        setattr(script, name, getattr(job.flags, name))
    num_chunks = placement.num_chunks if placement.num_chunks > 1 else None
    script.num_layers_per_virtual_pipeline_stage = script.num_virtual_stages_per_pipeline_rank = None
    script.virtual_pipeline_model_parallel_size = num_chunks
    # From Megatron-LM 0.19 on, scripts make the model's configuration and collect the process groups before `setup`.
    groups = setup.get("pg_collection")
    if groups is not None:
        groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    config = getattr(getattr(setup.get("cfg_container"), "model", None), "transformer", None)
    if config is not None:
        config.virtual_pipeline_model_parallel_size = num_chunks
        stages.configure(config)


def _saved_choice(checkpoint: ScriptCheckpoint, job: JobSettings) -> ChosenLayout | None:
    """Return the layout to restore from a checkpoint, or None if the checkpoint has no fitting layout."""
    if not checkpoint.is_continued or checkpoint.arguments is None:
        return None
    return saved_choice(checkpoint.arguments, job.flags)


def _has_local_checkpoint(setup: Call) -> bool:
    """Return whether the nodes of the job hold a checkpoint on local storage; a collective call."""
    manager = (setup.get("checkpointing_context") or {}).get("local_checkpoint_manager")
    return manager is not None and manager.find_latest() >= 0


def _reason_to_keep(script: Namespace, checkpoint: ScriptCheckpoint | None, job: JobSettings) -> str | None:
    """Return the reason why a script's model needs Megatron's layout; None if another layout may be chosen.

    Args:
        job: the settings with Megatron's layout.

    Raises:
        SessionError: the states of the distributed optimizer need another layout than Megatron's.
    """
    if getattr(script, "skip_train", False):
        return "the run only evaluates"
    if (name := _other_source(script)) is not None:
        return f"with {flag_name(name)} no other layout is known to work"
    if checkpoint is not None and (kind := checkpoint.other_format) is not None:
        return f"the checkpoint in {checkpoint} has the format {kind}, which fits no other layout"
    if checkpoint is not None and checkpoint.keeps_optimizers_layout:
        checkpoint.check_stages(job)
        return (
            f"the optimizer's states in {checkpoint} fit no other layout: save with "
            "--dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
        )
    return None


def _other_source(script: Namespace) -> str | None:
    """Return the name of a script argument that requires Megatron's layout; None if no such argument is given."""
    patterns = () if HYBRID_RECOMPUTES else ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next((name for name in (*patterns, *_KEEPS_MEGATRONS) if getattr(script, name, None)), None)


def check_chunk_functions(setup: Call, data_provider: Callable[..., Any] | None, job: JobSettings) -> None:
    """Check that the script's functions support several model chunks a rank if the layout has several chunks a rank.

    Raises:
        SessionError: a function of the script supports only one chunk.
    """
    if job.placement.num_chunks > 1:
        _refuse_one_chunk(_one_chunk_function(setup, data_provider), job.flags)


def _refuse_one_chunk(function: str | None, flags: JobFlags) -> None:
    """Raise `SessionError` if flags ask for several chunks, but the script's `function` supports only one chunk."""
    if function is not None and (asking := chunks_asked(flags)) is not None:
        raise SessionError(f"{asking}: the script's {function} has no parameter vp_stage, which several chunks need")


def _one_chunk_function(setup: Call, data_provider: Callable[..., Any] | None) -> str | None:
    """Return the name of the script's function that supports only one model chunk a rank; None without such a function.

    Megatron-LM passes the chunk's number as the argument `vp_stage` to the function that builds the model and to the
    function that makes the datasets; each of them needs a parameter `vp_stage` for several chunks.
    """
    provider = setup["model_provider_func"]
    if provider is not None and getattr(setup.get("cfg_container"), "model", None) is None:
        parameters = inspect.signature(provider).parameters.values()
        if not any(each.name == "vp_stage" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            return "model_provider"
    if data_provider is not None and "vp_stage" not in inspect.signature(data_provider).parameters:
        return "train_valid_test_dataset_provider"
    return None
