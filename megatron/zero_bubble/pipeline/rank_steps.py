"""Runs the training and evaluation steps of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, cast

import torch

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.batches import Load
from megatron.zero_bubble.pipeline.discovery import StepMessages
from megatron.zero_bubble.pipeline.failures import Failure, RecordingRecomputations, RecordingStore
from megatron.zero_bubble.pipeline.gradients import connect_ties
from megatron.zero_bubble.pipeline.held_layers import LayerBuilder
from megatron.zero_bubble.pipeline.interconnect import Agreement, Interconnect
from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.pipeline.options import PipelineOptions
from megatron.zero_bubble.pipeline.stage_layout import StageLayout
from megatron.zero_bubble.pipeline.step_orders import StepOrders
from megatron.zero_bubble.planner.run_schedules import prepare
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.copy_lane import copy_lane
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.runtime.stage import Stage


class RankSteps:
    """Builds the layers of one rank and runs the rank's steps; creating an instance is a collective call of all ranks.

    Args:
        layers: the layers of the whole model.
        loss_fn: the loss function; see `Pipeline`.

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
        self._rank, self._schedule, self._agreement = interconnect.rank, layout.schedule, agreement
        placement, device = self._schedule.placement, interconnect.device
        self._stores = RecordingStore(placement.num_chunks), RecordingRecomputations()
        self._offload = OffloadStore(copy_lane(device)) if self._schedule.offloads else None
        builder = LayerBuilder(layers, device, *self._stores, options)
        self.held = agreement.together(lambda: builder.hold(layout, self._rank))
        self.stage = LayerStage(self.held.chunks, placement, self._rank, loss_fn, device)
        for store in self._stores:
            store.recording = self.stage.recording
        self.tied = connect_ties(layers, layout, self.held, interconnect)
        shapes_vary = options.variable_shapes
        self.messages = StepMessages(
            self.stage, placement, interconnect, agreement, self.held, self.tied, shapes_vary=shapes_vary
        )
        self._orders = StepOrders(self._schedule, self._rank, agreement, device)
        self._plans_order = options.microbatch_order == "planned" and options.offload is None

    def train(self, load: Load, recorder: OpRecorder | None = None) -> torch.Tensor:
        """Run the forwards and backwards of a step; every rank returns the mean loss of the step's microbatches.

        Raises:
            ValueError: on all ranks, if the step's data are invalid, or the forward or backward of a layer fails.
        """
        autocast = Autocast.current(self.stage.device.type)
        with autocast.only_in_forwards(), torch.enable_grad():
            self.messages.begin(load, autocast, trains=True)
            for tied in self.tied:
                tied.begin_step()
            orders = self._plans_order and self.messages.shapes_vary
            with self._orders.step(self.stage, recorder) if orders else nullcontext(recorder) as recorder:
                # The executor only hands messages on, so they need not be tensors.
                self._training.run(cast(Stage, self.stage), recorder)
        return self._finish()

    def evaluate(self, load: Load) -> torch.Tensor:
        """Run a step's forwards without gradients; every rank returns the mean loss.

        `evaluate` raises the same errors as `train`.
        """
        autocast = Autocast.current(self.stage.device.type)
        with autocast.only_in_forwards(), torch.no_grad():
            self.messages.begin(load, autocast, trains=False)
            self._evaluation.run(cast(Stage, self.stage))
        return self._finish()

    @cached_property
    def _training(self) -> Executor:
        return self.executor()

    @cached_property
    def _evaluation(self) -> Executor:
        return self.executor(forward_only=True)

    def executor(self, *, forward_only: bool = False, post_validation: bool = False) -> Executor:
        """Make an executor for training or, with `forward_only`, for evaluation."""
        schedule = self._schedule
        if forward_only or post_validation:
            schedule = schedule.without_communication()
            schedule = prepare(schedule, forward_only=forward_only, post_validation=post_validation)
        communicator = cast(Communicator, self.messages.communicator)
        return Executor(schedule, self._rank, communicator, *self._stores, offload_store=self._offload)

    def _finish(self) -> torch.Tensor:
        """Return the loss of the step, or raise the error of the first failed microbatch; a collective call."""
        failures, cause, loss = self.stage.failures, self.stage.cause, self.stage.end()
        outcomes = self._agreement.gather((loss.cpu() if loss is not None else None, Failure.first_of(failures)))
        first = Failure.first_of(failure for _, failure in outcomes if failure is not None)
        if first is not None:
            raise ValueError(first.problem) from cause
        placement = self._schedule.placement
        of_last, _ = outcomes[placement.rank_of(placement.num_stages - 1)]
        assert of_last is not None
        return of_last.to(self.stage.device)
