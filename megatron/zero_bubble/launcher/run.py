"""Checks the settings, builds the model and runs the steps of a script's training under a zero-bubble schedule."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.launcher.command_line import PROGRAM, LaunchFlags
from megatron.zero_bubble.launcher.ddp_arguments import construct_ddp, shard_before_layout
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_checkpoint import ScriptCheckpoint, record_stages
from megatron.zero_bubble.launcher.script_choice import (
    build_layout,
    check_chunk_functions,
    keep_megatrons_layout,
    settle_layout,
)
from megatron.zero_bubble.launcher.script_settings import check_chunks, flags_of, refuse_script_settings
from megatron.zero_bubble.launcher.script_stages import ScriptStages
from megatron.zero_bubble.launcher.script_steps import ScriptPostValidation, ScriptReplicas, iterations_done
from megatron.zero_bubble.launcher.script_units import ScriptUnits
from megatron.zero_bubble.mcore.decoder_models import DECODER_MODELS, DECODER_NAMES
from megatron.zero_bubble.mcore.refused_settings import RECORDING
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.session.drawings import write_plan, write_scalars
from megatron.zero_bubble.session.layers import to_layout
from megatron.zero_bubble.session.output_places import check_zero_bubble_outputs
from megatron.zero_bubble.session.reports import idle_fields, idle_scalars, order_fields, wait_fields
from megatron.zero_bubble.session.run_summary import RunSummary
from megatron.zero_bubble.session.same_flags import check_same_flags
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.settings import check_implementation, job_settings
from megatron.zero_bubble.session.start_up import SessionError, users_mistakes

_LOG_LINE = re.compile(r" \[[^]]*\] iteration +(\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): ([\d.]+) \|")


class Run:
    """Runs a script's training; a `Run` is made after the script parses its arguments and before process groups exist.

    Args:
        script: the script's arguments, from Megatron-LM's `get_args()`.
        data_provider: the script's function that makes the datasets; None if it is unknown.

    Raises:
        SessionError: the script's settings and the launcher's flags contradict each other.
    """

    def __init__(self, script: Namespace, flags: LaunchFlags, data_provider: Callable[..., Any] | None = None) -> None:
        self._script = script
        self._data_provider = data_provider
        if getattr(script, "skip_train", False):
            flags = replace(flags, zero_bubble_post_validation=False, hierarchical_sgd=None)
        with users_mistakes():
            job = job_settings(flags_of(script, flags), os.environ, torch.cuda.is_available(), chooses_layout=True)
            refuse_script_settings(script, job.flags, job.placement.kind)
            if not job.is_layout_open:
                check_chunks(script, job.flags, job.placement)
            check_implementation(job.flags.transformer_impl)
            self.session = Session(job, PROGRAM)
        self.sessions = [self.session]
        self._built: list[torch.nn.Module] = []
        """The model chunks of this rank that the script has built."""
        self._chunks: list[torch.nn.Module] = []
        """The model chunks of this rank, wrapped in DDP."""
        self._optimizer: Any = None
        """The script's optimizer; None unless post-validation or hierarchical SGD needs the optimizer."""
        self.units = ScriptUnits(script, job.flags)
        self._post_validation: ScriptPostValidation | None = None
        """None before the first step, and if the schedule takes no optimizer steps, as on a single pipeline rank."""
        self.replicas = ScriptReplicas(script, self.session)
        self._summary = RunSummary()
        self.stages = self._placed()

    def _placed(self, *, is_chosen: bool = False) -> ScriptStages:
        """Return the `ScriptStages` of the layout; before a layout is chosen, the `ScriptStages` changes no stage.

        Args:
            is_chosen: whether zero bubble has chosen the layout; otherwise the script's arguments give the layout.
        """
        job, placement = self.session.job, self.session.job.first_placement
        has_copy = not job.flags.untie_embeddings_and_output_weights or job.flags.mtp_num_layers
        if has_copy and placement.rank_of(0) == placement.rank_of(placement.num_stages - 1):
            # Fully parallel saving assigns weights to replicas by name, and would save both copies of the embedding.
            self._script.ckpt_fully_parallel_save = False
        layout = None
        if job.flags.pattern is None and (is_chosen or placement.kind == "v"):
            given = job.flags.pipeline_model_parallel_layout or ""
            if "m" in given.rpartition("|")[0]:
                raise SessionError(
                    f"--pipeline-model-parallel-layout {given}: in a V, all prediction layers (m) are on the last stage"
                )
            layout = to_layout(job.partition, job.flags.mtp_num_layers)
        return ScriptStages(placement, layout, job.flags.pattern)

    def begin(self, call: Call) -> Any:
        """When `initialize_model_parallel` is called, make the schedules, then the process groups for the schedules.

        Raises:
            SessionError: ranks have different flags, no schedule exists for one of the job's numbers of microbatches,
                no schedule fits the memory limit, or the first rank cannot write an output.
        """
        with users_mistakes():
            check_same_flags(self.session.job.flags)
            self.session.make_schedules()
            on_rank(0, lambda: check_zero_bubble_outputs(self.session.job.flags))
        self.stages.set_embedding_ranks(call)
        return call.proceed()

    def set_up_model(self, call: Call) -> Any:
        """When `setup_model_and_optimizer` is called, choose the layout unless flags give it, and build the model."""
        if self.units.is_building:
            return call.proceed()
        checkpoint = ScriptCheckpoint.of(self._script)
        if self.session.job.is_layout_open:
            is_chosen = settle_layout(self._script, checkpoint, self.session, self.units, call, self._data_provider)
            self.stages = self._placed(is_chosen=is_chosen)
            if is_chosen:
                build_layout(self._script, call, self.session.job, self.stages)
        check_chunk_functions(call, self._data_provider, self.session.job)
        if checkpoint is not None:
            checkpoint.check_stages(self.session.job)
        call["model_provider_func"] = self.stages.placed_provider(call["model_provider_func"])
        return call.proceed()

    def _keep_layout(self) -> None:
        """Keep Megatron's layout if the script builds a model before zero bubble has chosen another layout."""
        if self.session.job.is_layout_open:
            reason = "the script builds its model without Megatron-LM's setup_model_and_optimizer"
            keep_megatrons_layout(self._script, self.session, reason)
            self.stages = self._placed()

    def build_chunk(self, call: Call) -> None:
        """Check the configuration that a model's constructor gets, and build the model chunk with its stage's layers.

        Raises:
            SessionError: the configuration has a setting that no zero-bubble schedule supports.
        """
        if self.units.is_building:
            self.units.build_chunk(call)
            return
        self._keep_layout()
        with users_mistakes():
            self.session.configure(call["config"], type(call.get("self")))
        self.stages.place(call)
        with self.session.initializing(is_first_stage=call["pre_process"]):
            call.proceed()
        self._built.append(call["self"])
        self.stages.finish(self._built)

    def select_layers(self, call: Call) -> Any:
        """Return a chunk's layer symbols and the number of layers before the chunk, like `select_pipeline_segment`."""
        if self.units.is_building:
            return list(call["main_pattern"]), 0
        return self.stages.select(call)

    def wrap_in_ddp(self, call: Call) -> None:
        """When DDP's constructor is called, split the backward of the chunk's linear layers into B and W.

        A script builds all its model chunks before it wraps the first chunk in DDP.

        Raises:
            SessionError: the layout needs another class of model, or a layer's backward cannot be split.
        """
        if self.units.is_building:
            self.units.wrap_in_ddp(call)
            return
        self._keep_layout()
        record_stages(self._script, self.session.job)
        with users_mistakes():
            self._check_class(unwrap_model(call["module"]))
            self._shard()
            self.session.split([call["module"]])
        construct_ddp(call)
        self._chunks.append(call["self"])

    def _check_class(self, model: Any) -> None:
        """Raise `SessionError` if the layout needs `DECODER_MODELS`, but the script's `model` is of another class."""
        is_v, spreads = self.stages.is_v, self.session.job.flags.vocabulary_parallel
        if not isinstance(model, DECODER_MODELS) and (is_v or spreads):
            layout = "a V placement" if is_v else "--zero-bubble-vocabulary-parallel on"
            instead = "choose a linear schedule" if is_v else "leave it out"
            name = "another model" if model is None else type(model).__name__
            raise SessionError(f"{layout} needs megatron-core's {DECODER_NAMES}, got {name}: {instead}")

    def lay_out_parameters(self, call: Call) -> Any:
        """When `compute_full_param_layout` is called, shard the vocabulary before DDP's buffers are laid out."""
        if not self.units.is_building:
            with users_mistakes():
                shard_before_layout(call, self._built, self._shard)
        return call.proceed()

    def _shard(self) -> None:
        """Shard the vocabulary over the pipeline ranks if the layout has vocabulary shards; later calls do nothing."""
        self.session.shard(self._built, self._script.padded_vocab_size)

    def forward_backward_func(self, call: Call) -> Any:
        """Return the function that runs the schedule, in place of megatron-core's forward-backward function."""
        return self.forward_backward

    def forward_backward(self, **arguments: Any) -> list[Any]:
        """Run one training step or evaluation, in place of megatron-core's forward-backward function.

        Raises:
            SessionError: no schedule for this number of microbatches fits the memory limit, or the script's forward
                step does something that the layout does not support.
        """
        if not self.session.has_started:
            self._start()
        trains = not arguments.get("forward_only", False)
        self.session.iteration = iterations_done(self._script, self.session, trains=trains)
        is_local = self.session.replicas.is_local
        arguments["forward_step_func"] = self.stages.placed(arguments["forward_step_func"])
        losses = self.stages.to_last_rank(self.session.forward_backward(**arguments))
        if trains:
            losses = self.replicas.own_losses(losses) if is_local else losses
            if self.session.job.hierarchy is None:
                self.replicas.after_step(self.session.iteration)
            self.session.after_iteration()
        return losses

    def keep_optimizer(self, call: Call) -> Any:
        self._optimizer = call.proceed()
        return self._optimizer

    def step(self, call: Call) -> Any:
        """Take the optimizer step unless the schedule has taken it; then, if due, average the replicas' parameters."""
        if call["self"] is not self._optimizer:
            return call.proceed()
        outcome = call.proceed() if self._post_validation is None else self._post_validation.step()
        if self.session.job.hierarchy is not None:
            self.replicas.after_step(self._script.curr_iteration + 1)
        return outcome

    def zero_gradients(self, call: Call) -> Any:
        """Zero the gradients if the last step is validated; otherwise, the validation will zero the gradients."""
        validation = self.session.post_validation
        return None if validation is not None and validation.is_pending else call.proceed()

    def agreed(self, value: Any, call: Call) -> Any:
        """Under post-validation, return `value` instead of reducing it: all ranks have the same value."""
        if self._post_validation is None:
            return call.proceed()
        # The replaced reduction converts to fp32, too, which changes the last digits of a logged learning rate.
        return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value

    def save(self, call: Call) -> Any:
        """Before `save_checkpoint`, validate the last step and average the replicas' weights and optimizer states."""
        self.session.settle()
        if self.session.job.hierarchy is not None and self.session.has_started:
            self.session.average_all(self._script.curr_iteration + 1, with_states=True)
        return call.proceed()

    def _start(self) -> None:
        """Start the session, after the model is built and any checkpoint is loaded; a collective call."""
        iteration = getattr(self._script, "iteration", 0)
        with users_mistakes():
            if not self._chunks:  # A run that only evaluates wraps no chunk in DDP.
                self._check_class(next(iter(self._built), None))
                self._shard()
                self.session.split(self._built)
                self._chunks = self._built
            self.session.start(self._chunks, self._optimizer, iteration, self._write_plan)
        if (run := self.session.forward_backward_func) is not None:
            run.rehearses = not any(getattr(self._script, name, None) for name in RECORDING.split())
        if (validation := self.session.post_validation) is not None:
            self._post_validation = ScriptPostValidation(self._script, validation, self._optimizer, self._chunks)

    def extend_log_line(self, call: Call) -> Any:
        """When `print_rank_last` prints a training log line, append the share of idle time; a collective call."""
        match, run = _LOG_LINE.match(call["message"]), self.session.forward_backward_func
        if match is not None and run is not None and self.session.num_steps > 0:
            prediction = run.running.prediction(self.session.num_microbatches)
            measured, predicted = run.measured_time(), None if prediction is None else prediction.idle
            write_scalars(idle_scalars(measured.idle, predicted), int(match[1]), *_writers())
            order, waits = order_fields(run.step_plans.take_times()), wait_fields(self.session.replicas.take_waits())
            call["message"] += idle_fields(measured.idle, predicted) + order + waits
            if self.session.num_steps > 1:  # The slow first step is not counted.
                self._summary.record(int(match[1]), float(match[2]), measured, prediction)
        return call.proceed()

    def train(self, call: Call) -> Any:
        """Run the script's training loop; then print the summary of its iterations, if there is a summary."""
        try:
            return call.proceed()
        finally:  # Megatron-LM raises SystemExit at --exit-interval and similar flags.
            if self._summary.line is not None:
                from megatron.training.utils import print_rank_last

                print_rank_last(self._summary.line)

    def _write_plan(self, report: Report) -> None:
        """Write a plan to the script's TensorBoard and W&B; a plan may follow a step that is not counted yet."""
        write_plan(report, self.session.iteration + (report.step > self.session.num_steps), *_writers())

    @property
    def had_nothing_to_train(self) -> bool:
        """Whether the script trains no iteration: it only evaluates or converts a checkpoint, or is at its end.

        With `--exit-on-missing-checkpoint`, a script without a checkpoint ends before the first iteration.
        """
        done, last = getattr(self._script, "iteration", 0), getattr(self._script, "train_iters", None)
        only = any(getattr(self._script, name, None) for name in ("skip_train", "ckpt_convert_format"))
        only |= bool(getattr(self._script, "exit_on_missing_checkpoint", False)) and not self.session.has_started
        return only or (last is not None and done >= last)


def _writers() -> tuple[Any, Any]:
    """Return the script's writers for TensorBoard and Weights & Biases; a writer that is not open is None."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    return get_tensorboard_writer(), get_wandb_writer()
