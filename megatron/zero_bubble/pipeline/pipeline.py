"""Splits a list of layers over ranks and trains them with any schedule.

pipeline = Pipeline(layers, loss_fn, schedule="zb-v", num_microbatches=8)
optimizer = torch.optim.Adam(pipeline.parameters())
loss = pipeline.train_batch((inputs, targets))
pipeline.clip_grad_norm_(1.0)
optimizer.step()
optimizer.zero_grad()
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.batches import microbatches_of
from megatron.zero_bubble.pipeline.discovery import StepMessages
from megatron.zero_bubble.pipeline.gradients import average_over, clip_grad_norm, connect_ties, own_norms
from megatron.zero_bubble.pipeline.held_layers import LayerBuilder, Unsplit
from megatron.zero_bubble.pipeline.interconnect import (
    HOST,
    Agreement,
    Interconnect,
    connect_ranks,
    default_device,
)
from megatron.zero_bubble.pipeline.late_steps import LateSteps, SteppingLayerStage, TrainingOutcome
from megatron.zero_bubble.pipeline.layer_costs import LayerTimes
from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.pipeline.layer_summary import Summary
from megatron.zero_bubble.pipeline.partial_model import PartialModel, layer_of
from megatron.zero_bubble.pipeline.same_arguments import check_same_arguments
from megatron.zero_bubble.pipeline.stage_layout import LayoutRequest, Partition, StageLayout, plan_for
from megatron.zero_bubble.pipeline.stage_times import stage_times
from megatron.zero_bubble.planner.run_schedules import prepare
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import OpRecorder, device_clock
from megatron.zero_bubble.runtime.stage import Stage
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement, Schedule

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Time after which a missing message or a rank missing in a collective fails the job."""

logger = logging.getLogger("megatron.zero_bubble")


class Pipeline(PartialModel):
    """A `torch.nn.Sequential` whose layers are spread over ranks.

    As a module it holds the layers of this rank, by their names in `torch.nn.Sequential(*layers)`. Every method that
    trains, evaluates, clips or gathers is a collective call of all ranks of the pipeline.

    Args:
        layers: modules, functions, `LayerSpec` or `TiedLayerSpec`, the same on all ranks.
        loss_fn: called with the last layer's output and the targets of a microbatch; returns one number.
        schedule: name of a schedule (see `megatron.zero_bubble.schedule.names()`), or a schedule.
        num_microbatches: microbatches of a step.
        partition: which layers a stage gets. "uniform" balances layers, "parameters" parameters, "type:REGEX" the
            layers whose class matches, "profile" their measured times; a list has the first layer of every stage but
            the first.
        memory_limit: most activations of a rank, in microbatches of a whole rank; for all ranks or one a rank. By
            default as much as the schedule of that name needs.
        num_chunks: stages of a rank, by default those of the schedule.
        checkpoint: whether all layers drop their activations in F and run again in R. A spec says so of one layer.
        split_layers: further classes of layers whose W is split off (see `weight_split.split_modules`).
        example: inputs and targets of one microbatch, for the partition "profile".
        variable_shapes: whether layers return other shapes for a microbatch than for another one with the same shapes
            of inputs, as one that drops padding does. Microbatches whose inputs differ are noticed without it.
        post_validation: whether `train_step` steps before the norm of all gradients is known.
        group: the ranks of the pipeline, by default all of the job.
        replicas: the ranks that hold the same stages of other pipelines; gradients are averaged over them.
        device: where the layers and messages are, by default this process's GPU with NCCL and else the CPU.
        timeout: for a message, or a rank that does not take part in a collective.
        interconnect: connects the ranks, by default over torch.distributed.

    Raises:
        ValueError: on all ranks, if the layers cannot be partitioned or built, or the schedule cannot be made.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        schedule: str | Schedule = "zb-v",
        num_microbatches: int = 8,
        partition: Partition = "parameters",
        memory_limit: float | Sequence[float] | None = None,
        *,
        num_chunks: int | None = None,
        checkpoint: bool = False,
        split_layers: Sequence[type[nn.Module]] = (),
        example: tuple[Any, Any] | None = None,
        variable_shapes: bool = False,
        post_validation: bool = False,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        interconnect: Interconnect | None = None,
    ) -> None:
        super().__init__()
        if variable_shapes and post_validation:
            raise ValueError("variable_shapes=True and post_validation=True do not go together")
        self.device = default_device(group) if device is None else torch.device(device)
        self.num_microbatches = num_microbatches
        self._interconnect = interconnect or connect_ranks(group, self.device, timeout)
        # A gloo group that is open while the interpreter ends may abort the process.
        self._close = weakref.finalize(self, self._interconnect.close)
        self._rank, self._replicas = self._interconnect.rank, replicas
        self._agreement = Agreement(self._interconnect.collectives(range(self._interconnect.size), HOST))
        layers = list(layers)
        check_same_arguments(
            self._agreement,
            layers,
            {
                "num_microbatches": num_microbatches,
                "schedule": schedule,
                "partition": partition,
                "memory_limit": memory_limit,
                "num_chunks": num_chunks,
                "checkpoint": checkpoint,
                "variable_shapes": variable_shapes,
                "post_validation": post_validation,
            },
        )
        recomputes = checkpoint or any(getattr(layer, "checkpoint", False) for layer in layers)
        size = self._interconnect.size

        def lay_out() -> StageLayout:
            plan = plan_for(schedule, size, num_chunks, memory_limit, recomputes=recomputes)
            request = LayoutRequest(
                layers, loss_fn, plan, num_microbatches, partition, example, self.device, split_layers
            )
            return request.layout()

        # One rank plans: all get the same schedule, and its mistakes are raised on all.
        self.layout = self._agreement.on(0, lay_out)
        self._stores = WeightGradStore(self._placement.num_chunks), RecomputationStore()
        builder = LayerBuilder(layers, self.device, *self._stores, split_layers, checkpoint)
        held = self._agreement.together(lambda: builder.hold(self.layout, self._rank))
        self._hold(held, len(layers))
        stage_class = SteppingLayerStage if post_validation else LayerStage
        self._stage = stage_class(held.chunks, self._placement, self._rank, loss_fn, self.device)
        self._tied = connect_ties(layers, self.layout, held, self._interconnect, self.device)
        self._messages = StepMessages(
            self._stage,
            self._placement,
            self._interconnect,
            self._agreement,
            self.device,
            shapes_vary=variable_shapes,
        )
        self._executors: dict[bool, Executor] = {}
        self._late = self._make_late_steps() if post_validation else None
        own = sum(parameter.numel() for parameter in self.own_parameters())
        counts = self._agreement.gather((held.unsplit, own))
        unsplit = sum((unsplit for unsplit, _ in counts), start=Unsplit())
        self._summary = Summary(self.layout, num_microbatches, unsplit, sum(count for _, count in counts))
        if replicas is not None:
            for tensor in (*self.own_parameters(), *self.buffers()):
                dist.broadcast(tensor.detach(), dist.get_process_group_ranks(replicas)[0], group=replicas)
        if self._rank == 0 and (replicas is None or replicas.rank() == 0):
            logger.info(self.summary())
            if notice := self._summary.notice():
                logger.warning(notice)

    def _make_late_steps(self) -> LateSteps:
        schedule = prepare(self.schedule.without_communication(), post_validation=True)
        communicator = cast(Communicator, self._messages.communicator)
        return LateSteps(
            Agreement(self._interconnect.collectives(range(self._interconnect.size), HOST)),
            cast(SteppingLayerStage, self._stage),
            self._messages,
            Executor(schedule, self._rank, communicator, *self._stores),
            self._tied,
            self.own_parameters(),
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        return self.layout.schedule

    @property
    def _placement(self) -> Placement:
        return self.layout.schedule.placement

    def train_batch(self, batch: Any = None) -> torch.Tensor:
        """Run forward and backward of one step; return the mean loss of its microbatches, on all ranks.

        Adds to the parameters' `.grad` the gradients of that mean, averaged over replicas.

        Args:
            batch: a pair (inputs, targets), split into microbatches along the first dimension of all tensors, or an
                iterator of the pairs of single microbatches. Ranks without the first and the last stage ignore the
                batch.

        Raises:
            ValueError: on all ranks, if the batch cannot be used.
        """
        return self._train(batch)

    def train_step(
        self, batch: Any, optimizer: torch.optim.Optimizer, max_norm: float = math.inf
    ) -> TrainingOutcome | None:
        """Run `train_batch`, clip, take the optimizer's step and drop the gradients; return loss and norm.

        With post-validation the ranks do not wait for each other, and the outcome is that of the previous step; None
        for the first step. A step that cannot be done is a `ValueError` of the next one; the pipeline cannot be used
        after it.
        """
        if self._late is None:
            outcome = TrainingOutcome(self.train_batch(batch), self.clip_grad_norm_(max_norm))
            optimizer.step()
            optimizer.zero_grad()
            return outcome
        with torch.enable_grad():
            self._late.run(partial(microbatches_of, batch, self.num_microbatches, self.device))
        self._sum_gradients()
        self._late.step(optimizer, max_norm, own_norms(self._counted()))
        return self._late.take_outcome()

    def settle(self) -> TrainingOutcome | None:
        """Validate the last step of `train_step`; return its outcome, None if there is none.

        Call it before anything else reads parameters or the optimizer's state. Methods of the pipeline do.
        """
        self._validate()
        return self._late.take_outcome() if self._late is not None else None

    def _validate(self) -> None:
        if self._late is not None:
            self._late.validate()

    def stage_times(self, batch: Any = None) -> list[LayerTimes]:
        """Run `train_batch` and return how many seconds each stage computed for one microbatch, on all ranks."""
        recorder = OpRecorder(device_clock(self.device))
        self._train(batch, recorder)
        own = stage_times(recorder.take(), self._placement, self._rank)
        of_all = {stage: times for part in self._agreement.gather(own) for stage, times in part.items()}
        return [of_all[stage] for stage in range(self._placement.num_stages)]

    def _train(self, batch: Any, recorder: OpRecorder | None = None) -> torch.Tensor:
        with torch.enable_grad():
            loss = self._run(batch, trains=True, recorder=recorder)
        self._sum_gradients()
        return loss

    def _sum_gradients(self) -> None:
        for tied in self._tied:
            tied.end_step()
        if self._replicas is not None:
            average_over(self._replicas, self.own_parameters())

    def eval_batch(self, batch: Any = None) -> torch.Tensor:
        """Run the forward of one step in evaluation mode; return the mean loss on all ranks.

        The batch has the form that `train_batch` takes.
        """
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            with torch.no_grad():
                return self._run(batch, trains=False)
        finally:
            for module in training:
                module.training = True

    def _run(self, batch: Any, *, trains: bool, recorder: OpRecorder | None = None) -> torch.Tensor:
        self._validate()
        autocast = Autocast.current(self.device.type)
        with autocast.only_in_forwards():
            load = partial(microbatches_of, batch, self.num_microbatches, self.device)
            self._messages.begin(load, autocast, trains=trains)
            if trains:
                for tied in self._tied:
                    tied.begin_step()
            # The executor only hands messages on, so they need not be tensors.
            self._executor(trains=trains).run(cast(Stage, self._stage), recorder)
        return self._finish()

    def _finish(self) -> torch.Tensor:
        """Return the loss of the step on every rank, or raise the error of the first forward that has failed."""
        failures, cause, loss = self._stage.failures, self._stage.cause, self._stage.end()
        outcomes = self._agreement.gather((loss.cpu() if loss is not None else None, min(failures, default=None)))
        failed = [failure for _, failure in outcomes if failure is not None]
        if failed:
            raise ValueError(min(failed).problem) from cause
        of_last, _ = outcomes[self._placement.rank_of(self._placement.num_stages - 1)]
        assert of_last is not None
        return of_last.to(self.device)

    def _executor(self, *, trains: bool) -> Executor:
        if trains not in self._executors:
            schedule = self.schedule if trains else prepare(self.schedule.without_communication(), forward_only=True)
            communicator = cast(Communicator, self._messages.communicator)
            self._executors[trains] = Executor(schedule, self._rank, communicator, *self._stores)
        return self._executors[trains]

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the state of this rank's layers, as any module does, once the last step is validated."""
        self._validate()
        return super().state_dict(*arguments, **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; return the norm before.

        It is `torch.nn.utils.clip_grad_norm_` of the whole model, in which every tied parameter counts once.
        """
        return clip_grad_norm(self.own_parameters(), self._counted(), self._agreement, max_norm, norm_type)

    def _counted(self) -> list[tuple[int, nn.Parameter]]:
        """Return this rank's parameters that no earlier stage has a copy of, each with its layer's index."""
        copies = {parameter for tied in self._tied for parameter in tied.parameters_beyond_first}
        return [(layer_of(name), own) for name, own in self.own_named_parameters().items() if own not in copies]

    def summary(self) -> str:
        """Describe the partition, and list the layers whose W stays in B with their share of the parameters."""
        return self._summary.text()

    def close(self) -> None:
        """Close the connections between the ranks, which otherwise are closed with the pipeline or at exit."""
        if self._late is not None:
            self._late.close()
        self._close()
