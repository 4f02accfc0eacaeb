"""Runs training loops that use megatron-core without Megatron-LM's trainer."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.launcher.command_line import PROGRAM, LaunchFlags
from megatron.zero_bubble.launcher.ddp_arguments import construct_ddp, shard_before_layout
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_settings import (
    chunks_asked,
    flags_of,
    refuse_in_own_loop,
    schedule_asked,
)
from megatron.zero_bubble.mcore.transformer_engine import compute_in_backward
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.output_places import check_zero_bubble_outputs
from megatron.zero_bubble.session.same_flags import check_same_flags
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.settings import job_settings
from megatron.zero_bubble.session.start_up import SessionError, users_mistakes


@dataclass
class _Model:
    """A model that a training loop builds: its chunks on this rank, and the session that runs its training steps."""

    session: Session
    flags: JobFlags
    config: weakref.ref[TransformerConfig]
    vocab_size: int
    references: list[weakref.ref[torch.nn.Module]] = field(default_factory=list)
    """Weak references to the model's chunks on this rank, because a loop may drop a model."""

    @property
    def built(self) -> list[torch.nn.Module]:
        """The model's chunks on this rank that still exist."""
        return [chunk for reference in self.references if (chunk := reference()) is not None]

    def shard(self) -> None:
        """Shard the vocabulary over the pipeline ranks if the layout has vocabulary shards; later calls do nothing."""
        self.session.shard(self.built, self.vocab_size)


class LoopRun:
    """Runs the training steps of every model in a process whose training loop is not Megatron-LM's trainer.

    A training loop may build several models, such as an actor and a critic. A model in megatron-core's DDP runs under a
    zero-bubble schedule; a model without DDP can only be evaluated, and runs under megatron-core's own schedule.
    """

    had_nothing_to_train = False

    def __init__(self, flags: LaunchFlags, timeout_minutes: int | None = None) -> None:
        refuse_in_own_loop(flags)
        self._flags, self._timeout_minutes = replace(flags, zero_bubble_keep_layout=flags.zero_bubble), timeout_minutes
        self._models: list[_Model] = []
        self._wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """The chunks of all models, wrapped in DDP."""
        self._is_running = False
        """Whether a step of a zero-bubble schedule runs."""
        self.sessions: list[Session] = []
        """The sessions of all models that the training loop has built."""

    def build_chunk(self, call: Call) -> None:
        """Check and adapt the configuration that a model's constructor gets, and build the model chunk.

        A model with another number of pipeline ranks than the process groups have, such as a teacher that one rank
        evaluates, is not a model of the pipeline, and is only built.

        Raises:
            SessionError: the configuration has a setting that no zero-bubble schedule supports, or the loop has not
                initialized megatron-core's process groups.
        """
        config, chunk = call["config"], call.get("vp_stage") or 0
        if not parallel_state.model_parallel_is_initialized():
            raise SessionError(
                "enable() needs megatron-core's own process groups, which initialize_model_parallel() makes; in "
                "Megatron-Bridge, leave out dist.use_decentralized_pg"
            )
        if config.pipeline_model_parallel_size != parallel_state.get_pipeline_model_parallel_world_size():
            call.proceed()
            return
        if chunk == 0:
            self._end_dropped_models()
            self._models.append(self._begin_model(call))
            self.sessions.append(self._models[-1].session)
        # A loop may build the chunks of several models in turn.
        begun = (model for model in self._models if model.config() is config and len(model.references) == chunk)
        model = next(begun, self._models[-1])
        with users_mistakes():
            model.session.configure(config, type(call["self"]))
        call.proceed()
        # If the loop puts the model into no DDP, no schedule runs W.
        compute_in_backward([call["self"]])
        model.references.append(weakref.ref(call["self"]))

    def _end_dropped_models(self) -> None:
        """Close the connections of models that the loop has dropped, as a search for hyperparameters does."""
        gc.collect()
        dropped = [model for model in self._models if model.references and not model.built]
        for model in dropped:
            self._models.remove(model)
            model.session.end_run()

    def _begin_model(self, call: Call) -> _Model:
        """Make the `_Model` for a model whose first chunk is constructed by `call`."""
        flags = flags_of_loop(call["config"], self._flags, self._timeout_minutes)
        if pattern := call.get("hybrid_layer_pattern"):
            num_layers = len(HybridPattern.parse(pattern).symbols)
            flags = replace(flags, hybrid_layer_pattern=pattern, num_layers=num_layers)
        if call.get("share_embeddings_and_output_weights") is False:
            flags = replace(flags, untie_embeddings_and_output_weights=True)
        with users_mistakes():
            check_same_flags(flags)
            on_rank(0, lambda: check_zero_bubble_outputs(flags))
            session = Session(job_settings(flags, os.environ, torch.cuda.is_available()), PROGRAM)
            # A schedule from a file is for one number of microbatches, which only the first step gives.
            if session.job.plan is None or session.job.plan.fixed_schedule is None:
                session.make_schedules()
        placement, built = session.job.placement, flags.model_chunks or 1
        if placement.kind == "v":
            raise SessionError(
                f"{chunks_asked(flags) or schedule_asked(flags)}: a V placement works with Megatron-LM's trainer alone"
            )
        if placement.num_chunks != built:
            raise SessionError(
                f"{schedule_asked(flags)}: the schedule has {placement.num_chunks} model chunks a rank, but the "
                f"process groups are for {built}: pass virtual_pipeline_model_parallel_size={placement.num_chunks} to "
                "initialize_model_parallel()"
            )
        return _Model(session, flags, weakref.ref(call["config"]), call.get("vocab_size") or 0)

    def wrap_in_ddp(self, call: Call) -> None:
        """When DDP's constructor is called, split the backward of the chunk's linear layers into B and W."""
        model = self._model_of(call["module"])
        if model is not None:
            with users_mistakes():
                model.shard()
                model.session.split([call["module"]])
            construct_ddp(call)
            self._wrapped.add(call["self"])
        else:
            call.proceed()

    def _model_of(self, chunk: torch.nn.Module) -> _Model | None:
        inner = unwrap_model(chunk)
        return next((model for model in self._models if any(inner is each for each in model.built)), None)

    def lay_out_parameters(self, call: Call) -> Any:
        """When `compute_full_param_layout` is called, shard the vocabulary before DDP's buffers are laid out."""
        with users_mistakes():
            for model in self._models:
                shard_before_layout(call, model.built, model.shard)
        return call.proceed()

    def forward_backward_func(self, call: Call) -> Any:
        """Return the function that runs a model's schedule, in place of megatron-core's forward-backward function."""
        original = call.proceed()

        def forward_backward(**arguments: Any) -> list[Any]:
            given = arguments["model"]
            chunks = list(given) if isinstance(given, (list, tuple)) else [given]
            model = self._model_of(chunks[0])
            if model is not None and chunks[0] in self._wrapped:
                self._is_running = True
                try:
                    if _comes_before_training(model, arguments):
                        return original(**arguments)
                    return _run(model, chunks, arguments)
                finally:
                    self._is_running = False
            if not arguments.get("forward_only", False):
                raise SessionError(
                    "the loop trains a model whose layers could not be split: it was built before enable(), is neither "
                    "a GPT nor a hybrid model of megatron-core, or is not in megatron-core's DistributedDataParallel"
                )
            return original(**arguments)

        return forward_backward

    def forward_step(self, call: Call) -> Any:
        """Raise an error if the loop trains a split model under megatron-core's own schedule.

        Raises:
            SessionError: the loop trains with one of megatron-core's functions itself.
        """
        if not self._is_running and torch.is_grad_enabled() and call["model"] in self._wrapped:
            raise SessionError(
                "the loop trains under megatron-core's own schedule: call get_forward_backward_func() after enable(), "
                "and train with the function that it returns"
            )
        return call.proceed()


def _comes_before_training(model: _Model, arguments: Mapping[str, Any]) -> bool:
    """Whether a call is an evaluation before the first training step, which megatron-core's own schedule can run.

    The first training step gives the number of microbatches for which schedules are made. An evaluation may have
    another number. With vocabulary shards, only a schedule with shards computes the output layer.
    """
    is_evaluation = arguments.get("forward_only", False)
    return is_evaluation and not model.session.has_started and not model.flags.vocabulary_parallel


def _run(model: _Model, chunks: Sequence[torch.nn.Module], arguments: dict[str, Any]) -> list[Any]:
    """Run one training step or evaluation of a model; the first call for a model also starts the model's session.

    Args:
        chunks: the model's chunks on this rank, wrapped in DDP.

    Raises:
        SessionError: no schedule for this number of microbatches fits the memory limit, or the loop's forward step
            does something that the layout does not support.
    """
    if not model.session.has_started:
        micro_batch_size, data_parallel_size = arguments["micro_batch_size"], model.flags.data_parallel_size
        sizes = {"micro_batch_size": micro_batch_size, "seq_length": arguments["seq_length"]}
        flags = replace(
            model.flags,
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * arguments["num_microbatches"] * data_parallel_size,
            given_model={**model.flags.given_model, **sizes},
        )
        with users_mistakes():
            model.session.complete(flags)
            model.session.start(list(chunks), None, 0)
    losses = model.session.forward_backward(**arguments)
    if not arguments.get("forward_only", False):
        model.session.replicas.after_step(model.session.iteration)
        model.session.after_iteration()
    return losses


def flags_of_loop(config: TransformerConfig, flags: LaunchFlags, timeout_minutes: int | None = None) -> JobFlags:
    """Make the job's flags from a model's configuration, the sizes of process groups and the launcher's flags.

    Args:
        timeout_minutes: timeout of the loop's process groups; None for the default of `JobFlags`.
    """
    timeout = {} if timeout_minutes is None else {"distributed_timeout_minutes": timeout_minutes}
    num_ranks, group_size = config.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage
    data_parallel_size = parallel_state.get_data_parallel_world_size()
    return flags_of(
        config,
        flags,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_parallel_size=data_parallel_size,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        model_chunks=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        decoder_first_pipeline_num_layers=config.num_layers_in_first_pipeline_stage,
        decoder_last_pipeline_num_layers=config.num_layers_in_last_pipeline_stage,
        # A provisional batch size, because only the first step gives the number of microbatches.
        global_batch_size=data_parallel_size * max(num_ranks, group_size or 0),
        # If the user gives no group size, megatron-core sets the group size to the number of ranks.
        microbatch_group_size_per_virtual_pipeline_stage=None if group_size == num_ranks else group_size,
        allow_padding_num_layers=True,
        # Timers wait for the device around every forward and backward from this level on.
        timing_log_level=getattr(config.timers, "_log_level", 0),
        **timeout,
    )
