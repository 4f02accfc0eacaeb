"""One training run of a script under a zero-bubble schedule: checks settings, builds the model and runs steps."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from megatron.zero_bubble.job.description import describe, describe_places
from megatron.zero_bubble.job.flags import limit_flag
from megatron.zero_bubble.job.layers import to_layout
from megatron.zero_bubble.job.plan_metrics import write_plan
from megatron.zero_bubble.job.running import idle_fields, idle_scalars, open_timeline, run_plan
from megatron.zero_bubble.job.settings import JobSettings, check_implementation, job_settings
from megatron.zero_bubble.job.sharding import check_shards
from megatron.zero_bubble.job.stalls import open_watchdog
from megatron.zero_bubble.job.timeline_writer import TimelineWriter
from megatron.zero_bubble.launcher.command_line import PROGRAM, LaunchFlags
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.mistakes import LauncherError, users_mistakes
from megatron.zero_bubble.launcher.script_choice import build_layout, megatrons_layout, settle_layout
from megatron.zero_bubble.launcher.script_layouts import ScriptLayouts
from megatron.zero_bubble.launcher.script_optimizer import ScriptPostValidation
from megatron.zero_bubble.launcher.script_replicas import ScriptReplicas
from megatron.zero_bubble.launcher.script_settings import check_chunks, flags_of, refuse_what_cannot_work
from megatron.zero_bubble.launcher.script_units import ScriptUnits
from megatron.zero_bubble.launcher.v_placement import VPlacement
from megatron.zero_bubble.mcore.checkpoint_writers import write_in_threads
from megatron.zero_bubble.mcore.checkpointed_blocks import checkpoint_every_layer
from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.placement import check_layers_built
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.step_settings import refuse_unsplit_recomputation, refuse_unsupported
from megatron.zero_bubble.mcore.transformer_engine import defer_weight_gradients
from megatron.zero_bubble.mcore.unit_seeds import drawn_by_unit, initialized_by_unit
from megatron.zero_bubble.mcore.vocabulary_model import shard_vocabulary
from megatron.zero_bubble.runtime.replanner import Report
from megatron.zero_bubble.runtime.watchdog import Watchdog
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Infeasible
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedules import ForwardBackward

_TRANSFORMER_ENGINE = "transformer_engine"
_LOG_LINE = re.compile(r" \[[^]]*\] iteration +(\d+)/ *\d+ \|")


class Run:
    """The training run of a script. It is made after the script parsed its arguments and before its process groups.

    Args:
        script: the script's arguments, from Megatron-LM's `get_args()`.

    Raises:
        LauncherError: the script's settings and the launcher's flags contradict each other.
    """

    def __init__(self, script: Namespace, flags: LaunchFlags) -> None:
        self._script = script
        has_cuda = torch.cuda.is_available()
        with users_mistakes():
            job_flags = flags_of(script, flags)
            refuse_what_cannot_work(script, job_flags)
            job = job_settings(job_flags, os.environ, has_cuda, chooses_layout=True)
            if not job.is_layout_open:
                check_chunks(script, job.flags, job.placement)
            check_implementation(job.flags)
        write_in_threads(keep_results=not getattr(script, "async_save", False))
        self._built: list[torch.nn.Module] = []
        """The model chunks of this rank that the script has built."""
        self._chunks: list[torch.nn.Module] = []
        """The same, wrapped in DDP."""
        self._optimizer: Any = None
        """The script's, if a hook keeps it."""
        self._resources = ExitStack()
        self._forward_backward: ForwardBackward | None = None
        self._timeline: TimelineWriter | None = None
        self._watchdog: Watchdog | None = None
        self._iteration = 0
        """The iteration after which the script begins."""
        self._num_microbatches = 0
        self.num_steps = 0
        """Training steps done."""
        self.v_placement: VPlacement | None = None
        self.layouts: ScriptLayouts | None = None
        self.units = ScriptUnits(script, job.flags)
        self._take(job)

    def _take(self, job: JobSettings, *, is_chosen: bool = False) -> None:
        """Take settings over, before anything is built; if their layout is open, another call follows.

        Args:
            is_chosen: whether the layout is not that of the script's own arguments.
        """
        self._job, placement = job, job.placement
        self._store = WeightGradStore(placement.num_chunks)
        self.post_validation = ScriptPostValidation(self._script, job)
        self.replicas = ScriptReplicas(self._script, job)
        if job.is_layout_open:
            return
        self.v_placement = VPlacement(placement) if placement.kind == "v" else None
        if is_chosen or placement.kind == "v":
            self.layouts = ScriptLayouts(placement, to_layout(job.partition, job.flags.mtp_num_layers))

    def set_up_model(self, call: Call) -> Any:
        """Hook around `setup_model_and_optimizer`: choose the layout if it is open, and let the script build it."""
        if self._job.is_layout_open and not self.units.is_building:
            job = settle_layout(self._script, self._job, self.units, call)
            self._take(job, is_chosen=not job.flags.zero_bubble_keep_layout)
            if not job.flags.zero_bubble_keep_layout:
                assert self.layouts is not None
                build_layout(self._script, call, job, self.layouts)
        return call.proceed()

    def _keep_layout(self) -> None:
        """Keep Megatron's layout if the script builds a model before another was chosen."""
        if self._job.is_layout_open:
            reason = "the script builds its model without Megatron-LM's setup_model_and_optimizer"
            self._take(megatrons_layout(self._script, self._job, reason))

    def build_chunk(self, call: Call) -> None:
        """Hook around the constructor of `GPTModel`: check its configuration, and build the chunk of its stage.

        Raises:
            LauncherError: the configuration has a setting that no zero-bubble schedule supports.
        """
        if self.units.is_building:
            self.units.build_chunk(call)
            return
        self._keep_layout()
        if self._job.flags.zero_bubble_recompute is not None:
            checkpoint_every_layer(call["config"])
        with users_mistakes():
            refuse_unsupported(call["config"], [], None)
            if self._job.flags.recompute is not Recompute.NONE:
                refuse_unsplit_recomputation(call["config"])
        if self._job.flags.transformer_impl == _TRANSFORMER_ENGINE:
            defer_weight_gradients(call["config"])
        if self.layouts is not None:
            self.layouts.place(call["config"])
        if self.v_placement is not None:
            self.v_placement.place(call)
        by_unit = initialized_by_unit(self._job.flags.seed, is_first_stage=call["pre_process"])
        with by_unit if self._job.flags.zero_bubble_seed_by_layer else nullcontext():
            call.proceed()
        self._built.append(call["self"])
        if self.v_placement is not None:
            self.v_placement.add_built(call["self"])

    def wrap_in_ddp(self, call: Call) -> None:
        """Hook around the constructor of megatron-core's DDP: split the linear layers of the wrapped chunk.

        Scripts wrap their chunks when all of them are built: before the first, the vocabulary is spread over the ranks.
        """
        if self.units.is_building:
            self.units.wrap_in_ddp(call)
            return
        self._keep_layout()
        with users_mistakes():
            if self._job.flags.vocabulary_parallel and not self._chunks:
                check_shards(self._job.flags, self._script.padded_vocab_size)
                shard_vocabulary(self._built, self._job.placement)
            split_weight_gradients([call["module"]], self._store)
        # With this setting DDP gives each layer its hook that accumulates and reduces a gradient; W calls the hook.
        call["ddp_config"] = replace(call["ddp_config"], delay_wgrad_compute=True)
        call.proceed()
        self._chunks.append(call["self"])

    def forward_backward(self, **arguments: Any) -> list[Any]:
        """Run one step or evaluation; the drop-in for megatron-core's forward-backward function.

        Raises:
            LauncherError: no schedule for this number of microbatches fits the memory limit, or the script's forward
                step does what vocabulary shards do not support.
        """
        run = self._forward_backward or self._start()
        is_local = self.replicas.is_local
        if self.v_placement is not None:
            arguments["forward_step_func"] = self.v_placement.placed(arguments["forward_step_func"])
        try:
            losses = run(**arguments)
        except Infeasible as error:
            raise LauncherError(f"{limit_flag(self._job.flags)}: {error}") from error
        except ForwardStepError as error:
            raise LauncherError(str(error)) from error
        if self.v_placement is not None:
            losses = self.v_placement.to_last_rank(losses)
        if not arguments.get("forward_only", False):
            self.num_steps += 1
            self._num_microbatches = arguments["num_microbatches"]
            losses = self.replicas.own_losses(losses) if is_local else losses
            if self._job.hierarchy is None:
                self.replicas.after_step(self._iteration + self.num_steps)
            if self._timeline is not None:
                self._timeline.after_iteration(self._iteration + self.num_steps, self._num_microbatches)
        return losses

    def keep_optimizer(self, call: Call) -> Any:
        self._optimizer = call.proceed()
        return self._optimizer

    def step(self, call: Call) -> Any:
        """Hook around `optimizer.step()`, which the schedule may have taken; replicas average after it."""
        if call["self"] is not self._optimizer:
            return call.proceed()
        outcome = self.post_validation.step(call)
        if self._job.hierarchy is not None:
            self.replicas.after_step(self._script.curr_iteration + 1)
        return outcome

    def save(self, call: Call) -> Any:
        """Hook around `save_checkpoint`: the last step is valid, and replicas have the same state."""
        self.post_validation.settle()
        self.replicas.average_before_saving()
        return call.proceed()

    def _start(self) -> ForwardBackward:
        """Make what runs steps, when the model is built and a checkpoint loaded; a collective call."""
        job, flags = self._job, self._job.flags
        self._iteration = getattr(self._script, "iteration", 0)
        with users_mistakes():
            check_layers_built(flags.num_layers, job.placement, self._chunks)
            describe(job, self._chunks)
        describe_places(job, is_megatron_lm=True)
        if job.flags.zero_bubble_seed_by_layer:
            with users_mistakes():
                by_unit = drawn_by_unit(flags.seed, self._chunks, lambda: self._iteration + self.num_steps)
                self._resources.enter_context(by_unit)
        post_validation = None
        if flags.zero_bubble_post_validation:
            post_validation = self.post_validation.build(self._optimizer, self._chunks)
        self.replicas.start(self._optimizer, self._chunks, self._iteration, post_validation)
        self._forward_backward = run_plan(job, self._store, self._iteration, post_validation, self._write_plan)
        self._timeline = open_timeline(job, self._forward_backward, self._iteration)
        self._watchdog = open_watchdog(flags, self._forward_backward, PROGRAM)
        return self._forward_backward

    def extend_log_line(self, message: str) -> str:
        """Append the idle share to the script's log line; other messages stay as they are. A collective call."""
        match = _LOG_LINE.match(message)
        if match is None or self._forward_backward is None or self.num_steps == 0:
            return message
        measured = self._forward_backward.measured_idle()
        predicted = self._forward_backward.predicted_idle(self._num_microbatches)
        _write_scalars(int(match[1]), idle_scalars(measured, predicted))
        return message + idle_fields(measured, predicted) + self.replicas.log_fields()

    def _write_plan(self, report: Report) -> None:
        """Write a plan to the script's TensorBoard and Weights & Biases, which one rank of the script has."""
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        write_plan(report, self._iteration + self.num_steps, get_tensorboard_writer(), get_wandb_writer())

    @property
    def had_nothing_to_train(self) -> bool:
        """Whether the script's own flags, or a finished checkpoint, leave no iteration to train."""
        done, last = getattr(self._script, "iteration", 0), getattr(self._script, "train_iters", None)
        return bool(getattr(self._script, "skip_train", False)) or (last is not None and done >= last)

    def close(self) -> None:
        """Close the watchdog and the channels, which use the process groups. A second call does nothing."""
        self._resources.close()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._forward_backward is not None:
            self._forward_backward.close()
            self._forward_backward = None


def _write_scalars(iteration: int, scalars: dict[str, float]) -> None:
    """Write `scalars` to the script's TensorBoard and Weights & Biases, if it has opened them."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    for tag, value in scalars.items():
        if tensorboard is not None:
            tensorboard.add_scalar(tag, value, iteration)
        if wandb is not None:
            wandb.log({tag: value}, iteration)
