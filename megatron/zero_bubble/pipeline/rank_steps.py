"""Runs the steps of one rank with its layers, the messages between stages, and the schedule's executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.batches import Microbatches
from megatron.zero_bubble.pipeline.discovery import StepMessages
from megatron.zero_bubble.pipeline.gradients import LayerNorm, connect_ties
from megatron.zero_bubble.pipeline.held_layers import LayerBuilder
from megatron.zero_bubble.pipeline.interconnect import Agreement, Interconnect
from megatron.zero_bubble.pipeline.late_steps import LateSteps, SteppingLayerStage
from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.pipeline.options import PipelineOptions
from megatron.zero_bubble.pipeline.stage_layout import StageLayout
from megatron.zero_bubble.pipeline.step_orders import StepOrders
from megatron.zero_bubble.planner.run_schedules import prepare
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.copy_lane import copy_lane
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.runtime.stage import Stage
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Schedule

Load = Callable[[], Microbatches]
"""Returns the microbatches of a step; called on the ranks of the first and the last stage."""


class RankSteps:
    """Builds the layers of one rank and runs its steps; creating an instance is a collective call of all ranks.

    Args:
        layers: the layers of the whole model.
        loss_fn: the `loss_fn` of `Pipeline`.

    Raises:
        ValueError: on all ranks, if a layer cannot be built.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        layout: StageLayout,
        options: PipelineOptions,
        interconnect: Interconnect,
        agreement: Agreement,
    ) -> None:
        self._rank, self._schedule = interconnect.rank, layout.schedule
        self._interconnect, self._agreement = interconnect, agreement
        placement, device = self._schedule.placement, interconnect.device
        self._stores = WeightGradStore(placement.num_chunks), RecomputationStore()
        self._offload = OffloadStore(copy_lane(device)) if self._schedule.offloads else None
        builder = LayerBuilder(layers, device, *self._stores, options)
        self.held = agreement.together(lambda: builder.hold(layout, self._rank))
        stage_class = SteppingLayerStage if options.post_validation else LayerStage
        self._stage = stage_class(self.held.chunks, placement, self._rank, loss_fn, device)
        self.tied = connect_ties(layers, layout, self.held, interconnect)
        shapes_vary = options.variable_shapes
        self._messages = StepMessages(self._stage, placement, interconnect, agreement, shapes_vary=shapes_vary)
        self._orders = StepOrders(self._schedule, self._rank, agreement, device)
        self._plans_order = options.microbatch_order == "planned" and self._offload is None
        self._executors: dict[bool, Executor] = {}

    def late_steps(
        self, parameters: Callable[[], Sequence[torch.nn.Parameter]], norms: Callable[[], list[LayerNorm]]
    ) -> LateSteps:
        """Make the object that runs training steps with post-validation; a collective call.

        Args:
            parameters: returns the parameters of this rank.
            norms: returns the norms of this rank's gradients.
        """
        return LateSteps(
            Agreement.among_all(self._interconnect),
            cast(SteppingLayerStage, self._stage),
            self._messages,
            self._executor_of(prepare(self._schedule.without_communication(), post_validation=True)),
            self.tied,
            parameters,
            norms,
        )

    def train(self, load: Load, recorder: OpRecorder | None = None) -> torch.Tensor:
        """Run the forwards and backwards of a step; every rank returns the mean loss.

        Raises:
            ValueError: on all ranks, if the data cannot be used or a layer fails.
        """
        autocast = Autocast.current(self._stage.device.type)
        with autocast.only_in_forwards(), torch.enable_grad():
            self._messages.begin(load, autocast, trains=True)
            for tied in self.tied:
                tied.begin_step()
            orders = self._plans_order and self._messages.shapes_vary
            with self._orders.step(self._stage, recorder) if orders else nullcontext(recorder) as recorder:
                self._run(recorder, trains=True)
        return self._finish()

    def evaluate(self, load: Load) -> torch.Tensor:
        """Run a step's forwards without gradients; every rank returns the mean loss. Raises errors as `train` does."""
        autocast = Autocast.current(self._stage.device.type)
        with autocast.only_in_forwards(), torch.no_grad():
            self._messages.begin(load, autocast, trains=False)
            self._run(None, trains=False)
        return self._finish()

    def _run(self, recorder: OpRecorder | None, *, trains: bool) -> None:
        if trains not in self._executors:
            schedule = self._schedule
            forward_only = None if trains else prepare(schedule.without_communication(), forward_only=True)
            self._executors[trains] = self._executor_of(forward_only or schedule)
        # The executor only hands messages on, so they need not be tensors.
        self._executors[trains].run(cast(Stage, self._stage), recorder)

    def _executor_of(self, schedule: Schedule) -> Executor:
        communicator = cast(Communicator, self._messages.communicator)
        return Executor(schedule, self._rank, communicator, *self._stores, offload_store=self._offload)

    def _finish(self) -> torch.Tensor:
        """On every rank, return the loss of the step, or raise the error of the first failed forward."""
        failures, cause, loss = self._stage.failures, self._stage.cause, self._stage.end()
        outcomes = self._agreement.gather((loss.cpu() if loss is not None else None, min(failures, default=None)))
        failed = [failure for _, failure in outcomes if failure is not None]
        if failed:
            raise ValueError(min(failed).problem) from cause
        placement = self._schedule.placement
        of_last, _ = outcomes[placement.rank_of(placement.num_stages - 1)]
        assert of_last is not None
        return of_last.to(self._stage.device)
