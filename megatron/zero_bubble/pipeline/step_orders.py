"""Plans the order of microbatches of different shapes in a training step, and reorders the microbatches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from megatron.zero_bubble.pipeline.batches import sizes_of
from megatron.zero_bubble.pipeline.interconnect import Agreement
from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.planner.step_plan import StepRules
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.recorder import OpRecorder, device_clock
from megatron.zero_bubble.runtime.step_planner import FIRST_STEPS, StepPlanner
from megatron.zero_bubble.schedule import Schedule
from megatron.zero_bubble.schedule.default_costs import default_costs

T = TypeVar("T")
logger = logging.getLogger("megatron.zero_bubble")


class _Peers:
    """The ranks of a pipeline that plan a step together; implements the protocol `step_planner.Peers`."""

    def __init__(self, agreement: Agreement, first_rank: int) -> None:
        self._agreement, self._first_rank = agreement, first_rank

    def on_first(self, action: Callable[[], T]) -> T:
        return self._agreement.on(self._first_rank, action)

    def gather(self, value: T) -> list[T]:
        return self._agreement.gather(value)

    def highest(self, level: int) -> int:
        """Return `level`, which is 0 in every pipeline, because steps of a `Pipeline` have no memory limit in bytes."""
        return level


class StepOrders:
    """Plans the order of the microbatches in each training step whose microbatches differ in shape.

    Args:
        schedule: the schedule of a training step.
        rank: this rank's number in the pipeline.
    """

    def __init__(self, schedule: Schedule, rank: int, agreement: Agreement, device: torch.device) -> None:
        self._rules = StepRules(RunSchedules.of(schedule).with_shared(schedule))
        self._count, self._rank = schedule.num_microbatches, rank
        self._observer = StepObserver(device_clock(device))
        peers = _Peers(agreement, schedule.placement.rank_of(0))
        self._planner = StepPlanner(schedule.placement, rank, self._observer, FIRST_STEPS, peers)
        self._step = 0

    @contextmanager
    def step(self, stage: LayerStage, recorder: OpRecorder | None) -> Iterator[OpRecorder | None]:
        """Reorder the microbatches of `stage` for the training step that the `with` block runs; a collective call.

        Args:
            recorder: the recorder with which the caller measures the step, or None. If `recorder` is None, the
                planner decides whether the step is measured.

        Yields:
            The recorder of the step; None if the step is not measured.
        """
        self._step += 1
        read_sizes = partial(sizes_of, stage.microbatches.inputs)
        decision = self._planner.decide(self._step, self._rules, self._count, read_sizes)
        stage.reorder(decision.places)
        if decision.order is not None and self._rank == 0:
            logger.debug("microbatch order %s: %.3f times as fast", decision.places, decision.order.gain)
        measures = recorder is None and self._planner.measures(self._step)
        yield self._observer.start(self._step) if measures else recorder
        if measures:
            self._observer.stop()
        self._planner.after_step(self._step, lambda: default_costs(self._rules.plan.placement))
