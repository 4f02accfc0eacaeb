"""`Session`: one training run with zero bubble, for a training loop like Megatron's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as mcore
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.mcore.checkpointed_blocks import checkpoint_every_layer, shorter_last_blocks
from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.model_units import UnitModels
from megatron.zero_bubble.mcore.paired_stage import refuse_unpaired
from megatron.zero_bubble.mcore.placement import adopt_placement, check_layers_built
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.mcore.step_call import refuse_unsplit_recomputation, refuse_unsupported
from megatron.zero_bubble.mcore.unit_seeds import drawn_by_unit, initialized_by_unit
from megatron.zero_bubble.mcore.vocabulary_model import shard_vocabulary
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.runtime.watchdog import Watchdog
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Infeasible, Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.description import describe
from megatron.zero_bubble.session.drawings import TimelineWriter, open_timeline
from megatron.zero_bubble.session.features import HIERARCHICAL_SGD, POST_VALIDATION, check_shards
from megatron.zero_bubble.session.flags import limit_flag
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layout_choice import ChosenLayout
from megatron.zero_bubble.session.new_layout import new_choice
from megatron.zero_bubble.session.plans import make_schedules
from megatron.zero_bubble.session.profiling import given_profile, restored_text
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.running import Replicas, build_post_validation, costs_of_units, run_plan
from megatron.zero_bubble.session.settings import JobSettings, job_settings
from megatron.zero_bubble.session.stalls import open_watchdog
from megatron.zero_bubble.session.start_up import SessionError


class Session:
    """One training run with zero bubble, or with megatron-core's own schedule if no zero-bubble schedule is set.

    The training loop calls `make_schedules` at the beginning; `unit_costs` and `choose_layout` when the process groups
    exist; `configure`, `initializing`, `shard` and `split` while the model is built; `start` when model and optimizer
    are built and loaded; `forward_backward` and `after_iteration` in every iteration; `settle` before code outside a
    training step reads parameters; `close` at the end. As a context manager, a session undoes its patches on exit.

    Args:
        job: the checked settings. If the settings leave the layout open, the training loop calls `choose_layout`,
            `restore_layout` or `keep_megatrons_layout` before it builds the model.
        program: name of the program; the watchdog's lines begin with this name.

    Attributes:
        has_started: whether `start` has succeeded.
        iteration: number of completed training iterations, including iterations before the run.
        num_steps: number of training iterations that this run has completed.
        num_microbatches: number of microbatches in the last iteration.
        store: keeps the weight gradients that B defers to W; None under megatron-core's own schedule.
        post_validation: runs the optimizer within the schedule; None if the training loop runs the optimizer.
        replicas: averages parameters under hierarchical SGD, and measures how long replicas wait; set by `start`.
        run: forward-backward function, set by `start`; megatron-core's own function if there is no zero-bubble
            schedule.
        forward_backward_func: the function `run` if `run` runs a zero-bubble schedule; otherwise None.
    """

    replicas: Replicas
    run: Callable[..., list[Any]]

    def __init__(self, job: JobSettings, program: str) -> None:
        self._program = program
        self._resources = ExitStack()
        self._timeline: TimelineWriter | None = None
        self._watchdog: Watchdog | None = None
        self._units: tuple[UnitModels, Sequence[int]] | None = None
        self.has_started = False
        self.iteration = self.num_steps = self.num_microbatches = 0
        self.post_validation: PostValidation | None = None
        self.forward_backward_func: ForwardBackward | None = None
        self._take(job)

    def _take(self, job: JobSettings) -> None:
        self.job = job
        self.store = WeightGradStore(job.placement.num_chunks) if job.plan is not None else None

    @classmethod
    def to_build(cls, flags: JobFlags, placement: Placement, store: WeightGradStore | None = None) -> Session:
        """Return a session that only builds models; their backward is split into B and W only if `store` is given."""
        session = cls(JobSettings(flags, None, placement, ()), "")
        session.store = store
        return session

    # Methods that choose the schedules and the layout.

    def make_schedules(self) -> None:
        """Make the schedules of a fixed layout; the schedules of an open layout are made at the first step.

        Raises:
            ValueError: for some number of microbatches, no schedule exists or none fits the memory limit.
        """
        if self.job.plan is not None and not self.job.is_layout_open:
            make_schedules(self.job.flags, self.job.plan)

    def complete(self, flags: JobFlags) -> None:
        """Replace the job's flags by `flags`, which contain the batch size and sequence length of the first step.

        Raises:
            ValueError: a flag does not work, or no schedule fits the memory limit.
        """
        self.job = job_settings(flags, os.environ, torch.cuda.is_available())
        self.make_schedules()

    def unit_costs(self, models: UnitModels, kinds: Sequence[int]) -> ModelCosts:
        """Measure costs of embedding, layers and output, or derive them from a profile; a collective call of all ranks.

        Args:
            kinds: for each layer, the index of its kind.

        Raises:
            ValueError: the given profile cannot be read, or does not determine the costs.
        """
        self._units = models, kinds
        return costs_of_units(self.job.flags, models, kinds, given_profile(self.job.flags))

    def choose_layout(self, costs: ModelCosts, padded_vocab_size: int, **restrictions: Any) -> Mapping[str, Any]:
        """Choose the partition, placement and chunks that the flags leave open; a collective call of all ranks.

        Args:
            costs: the result of `unit_costs`.
            restrictions: flags, as keyword arguments, that override the job's flags during the choice.

        Returns:
            Names and values of the flags that fix the layout.

        Raises:
            ValueError: no layout fits in the memory, or a flag does not work with the chosen layout.
        """
        choice = new_choice(replace(self.job.flags, **restrictions), costs, padded_vocab_size, self._units)
        self._take_layout(self.job.flags, choice)
        return choice.flags

    def restore_layout(self, saved: ChosenLayout, folder: str) -> Mapping[str, Any]:
        """Adopt the layout of the checkpoint in `folder`, to keep the saved run's numerics; see `choose_layout`."""
        self._take_layout(self.job.flags, saved)
        print_rank_0(restored_text(self.job.flags, self.job.planning, folder))
        return saved.flags

    def keep_megatrons_layout(self, reason: str) -> None:
        """Keep Megatron's layout although the settings allow other layouts, and print the reason; a collective call.

        Raises:
            ValueError: a flag does not work with Megatron's layout.
        """
        print_rank_0(f" > layout: Megatron's, because {reason}")
        self._take_layout(replace(self.job.flags, zero_bubble_keep_layout=True))
        self.make_schedules()

    def _take_layout(self, flags: JobFlags, choice: ChosenLayout | None = None) -> None:
        self._take(job_settings(flags, os.environ, torch.cuda.is_available(), choice=choice))
        adopt_placement(self.job.placement)
        self._units = None  # frees the microbatch with which the units were measured

    # Methods that change the model.

    def configure(self, config: TransformerConfig, model_class: type[Any] | None = None) -> None:
        """Prepare the configuration of the model's chunks before the chunks are built.

        Args:
            model_class: class of the model; None if the class is known to support recomputation and pairs of F and B.

        Raises:
            ValueError: the configuration has a setting that zero-bubble schedules do not support.
        """
        if self.store is None:
            return
        flags = self.job.flags
        if flags.zero_bubble_recompute is not None:
            checkpoint_every_layer(config)
        refuse_unsupported(config, [], None)
        if flags.recompute is not Recompute.NONE:
            refuse_unsplit_recomputation(config, model_class)
        if flags.overlap_moe_expert_parallel_comm:
            refuse_unpaired(config, model_class)

    def initializing(self, *, is_first_stage: bool, first_layer: int = 0) -> AbstractContextManager[None]:
        """Context for building a chunk; with `--zero-bubble-seed-by-layer`, each layer draws weights from its own seed.

        Args:
            first_layer: number of layers in earlier stages if every chunk numbers its layers from 1; otherwise 0.
        """
        if not self.job.flags.zero_bubble_seed_by_layer:
            return nullcontext()
        return initialized_by_unit(self.job.flags.seed, is_first_stage=is_first_stage, first_layer=first_layer)

    def shard(self, chunks: Sequence[torch.nn.Module], padded_vocab_size: int) -> None:
        """If the layout has vocabulary shards and `chunks` still lack the shards, give each rank its vocabulary shard.

        Raises:
            ValueError: the vocabulary does not divide into as many shards as there are ranks.
        """
        if self.job.flags.vocabulary_parallel:
            check_shards(self.job.flags, padded_vocab_size)
            shard_vocabulary(chunks, self.job.placement)

    def split(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Split the backward of linear layers in `chunks` into B and W; call this before `chunks` are wrapped in DDP.

        DDP's configuration must set `delay_wgrad_compute`, so that W calls DDP's hook for each layer's weight gradient.

        Raises:
            ValueError: a layer has a setting with which its backward cannot be split.
        """
        if self.store is not None:
            split_weight_gradients(chunks, self.store)

    # Methods of the training loop.

    def start(
        self,
        model: list[torch.nn.Module],
        optimizer: Any,
        iteration: int,
        write_plan: Callable[[Report], None] = lambda report: None,
    ) -> None:
        """Make the objects that run the schedule, after model and optimizer are built and loaded; a collective call.

        Args:
            model: this rank's chunks, wrapped for data parallelism.
            optimizer: megatron-core's optimizer; None only if post-validation and averaging of replicas are off.
            iteration: number of iterations that were done before the run.
            write_plan: function to call on every rank with each plan from measured costs, after the plan is printed.

        Raises:
            ValueError: the model or the optimizer does not fit the settings.
        """
        job, flags = self.job, self.job.flags
        self.iteration = iteration
        if optimizer is None and (flags.zero_bubble_post_validation or job.hierarchy is not None):
            flag = HIERARCHICAL_SGD if job.hierarchy is not None else POST_VALIDATION
            raise ValueError(f"{flag} needs an optimizer made by megatron-core's get_megatron_optimizer")
        check_layers_built(flags.num_layers, job.placement, model)
        describe(job, model)
        self._resources.enter_context(shorter_last_blocks())
        if flags.zero_bubble_seed_by_layer:
            self._resources.enter_context(drawn_by_unit(flags.seed, model, lambda: self.iteration))
        self.post_validation = build_post_validation(flags, job.plan, optimizer, model)
        changed = self.post_validation.parameters_changed if self.post_validation is not None else lambda: None
        self.replicas = Replicas(job, optimizer, model, iteration, changed)
        if self.store is None:
            self.run = mcore.get_forward_backward_func()
        else:
            self.run = self.forward_backward_func = run = self.open_run(iteration, write_plan)
            self._timeline = open_timeline(flags, run, iteration)
            self._watchdog = open_watchdog(flags, run, self._program)
        self.has_started = True

    def open_run(self, iteration: int, write_plan: Callable[[Report], None]) -> ForwardBackward:
        """Return the forward-backward function of a run that begins after `iteration`."""
        assert self.store is not None
        return run_plan(self.job, self.store, iteration, self.post_validation, write_plan)

    def forward_backward(self, **arguments: Any) -> list[Any]:
        """Run a step or an evaluation; arguments and result are as in megatron-core's forward-backward function.

        Raises:
            SessionError: no schedule for this number of microbatches fits the memory limit, or the forward step does
                something that the layout does not support.
        """
        try:
            losses = self.run(**arguments)
        except Infeasible as error:
            raise SessionError(f"{limit_flag(self.job.flags)}: {error}") from error
        except ForwardStepError as error:
            raise SessionError(str(error)) from error
        if not arguments.get("forward_only", False):
            self.iteration += 1
            self.num_steps += 1
            self.num_microbatches = arguments["num_microbatches"]
        return losses

    def after_iteration(self) -> None:
        """Draw the iteration that has just ended if flags ask for it; a collective call of rank 0's pipeline."""
        if self._timeline is not None:
            self._timeline.after_iteration(self.iteration, self.num_microbatches)

    def settle(self) -> None:
        """Validate the last optimizer step if it is not validated yet; needed before an evaluation or a checkpoint."""
        if self.post_validation is not None:
            self.post_validation.validate()

    def average_all(self, iteration: int, *, with_states: bool = False) -> None:
        """Validate the last optimizer step, and average the parameters under hierarchical SGD; a collective call."""
        self.settle()
        self.replicas.average_all(iteration, with_states=with_states)

    def end_run(self) -> None:
        """Close the watchdog, then the channels between stages; a second call has no effect."""
        opened = self.forward_backward_func, self._watchdog
        self.forward_backward_func = self._watchdog = None
        with ExitStack() as ending:
            for each in opened:
                ending.callback(each.close if each is not None else lambda: None)

    def close(self) -> None:
        """End the run, and undo all patches, also after an error; a second call has no effect."""
        with self._resources as ending:
            ending.callback(self.end_run)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()
