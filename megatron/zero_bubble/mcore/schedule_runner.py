"""Runs forward and backward of a step with the schedules of a plan, in place of megatron-core's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.mcore.connections import Connections
from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.fully_sharded import fully_sharded
from megatron.zero_bubble.mcore.microbatch_orders import StepPlans
from megatron.zero_bubble.mcore.paired_stage import PairedStage
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.step_call import (
    StepCall,
    refuse_sharded,
    refuse_unsplit_recomputation,
    refuse_unsupported,
)
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep
from megatron.zero_bubble.mcore.warm_up import warm_up
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.copy_lane import copy_lane
from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.memory_meter import memory_meter
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.plan_report import PlanningOptions, Report
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import OpRecorder, PipelineTime, StepTime, device_clock, idle_share
from megatron.zero_bubble.runtime.replanner import Replanner
from megatron.zero_bubble.runtime.run_costs import RunCosts
from megatron.zero_bubble.runtime.running_plan import RunningPlan
from megatron.zero_bubble.runtime.watchdog import Position
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Schedule, ScheduleError
from megatron.zero_bubble.schedule.lower_collectives import joined_early
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.step_ops import num_forwards_before_validation


class ForwardBackward:
    """Runs forward and backward of all microbatches of a step with the schedules of a plan.

    For each number of microbatches, one schedule is generated, completed with communication operations, validated, and
    kept for later steps. The process groups of the channels are created when the first step or evaluation begins.

    Args:
        connections: the channels between ranks; by default over torch.distributed, with a timeout of 10 minutes.
        planning: options for profiling the run and for planning again from the measured costs; by default, the run
            keeps `plan`.
        report: function that is called on every rank with each decision of the planner during the run.
        post_validation: takes the optimizer's steps within the schedule; None if optimizer steps follow the schedule.
        pairs: whether a forward and a backward may run as one operation (see `PairedStage`).
        orders_microbatches: whether microbatches of different sizes run in an order that is planned for their sizes
            (see `StepPlanner`); by default, only if the model's configuration sets `variable_seq_lengths`.

    Attributes:
        running: the plan whose schedules run at present, and the predictions of these schedules.
        connections: the channels between ranks, and the collectives of vocabulary shards.
        step_plans: the orders of microbatches that are planned for single steps.
        warms_up: whether each stage warms up before the next training step (see `mcore/warm_up.py`): true before the
            first step on a GPU, false otherwise.
        rehearses: whether the warm-up also computes a microbatch; to be set to false if forwards are recorded.
    """

    def __init__(
        self,
        plan: RunSchedules,
        store: WeightGradStore,
        connections: Connections | None = None,
        planning: PlanningOptions | None = None,
        report: Callable[[Report], None] = lambda report: None,
        post_validation: PostValidation | None = None,
        *,
        pairs: bool = False,
        orders_microbatches: bool | None = None,
    ) -> None:
        chunks = plan.placement.num_chunks
        if chunks != store.num_chunks:
            raise ScheduleError(
                f"schedule {plan.name} has {chunks} chunks a rank, the WeightGradStore {store.num_chunks}"
            )
        self._store = store
        # If the schedule has no R, B recomputes as the model's configuration requires.
        self._recomputation_store = None if plan.recompute is Recompute.NONE else RecomputationStore()
        self._offload_store = OffloadStore(copy_lane(own_device())) if plan.offloads else None
        self._post_validation = post_validation
        self._pairs = pairs
        self.connections = connections or Connections()
        self._usual_message: TensorSpec | None = None
        self._rank = parallel_state.get_pipeline_model_parallel_rank()
        self._num_calls, self._num_steps = 0, 0
        self.warms_up, self.rehearses = own_device().type == "cuda", True
        self._last_executor: Executor | None = None
        self._is_in_step = self._has_lost_messages = False
        self.observer = StepObserver(device_clock(own_device()))
        measured = RunCosts(
            *(plan.placement, self._rank, self.observer, self._measure_messages),
            recomputation=self._recomputation_store,
            offload=self._offload_store,
        )
        planning = planning or PlanningOptions()
        replanner = Replanner(plan, planning, measured, report, own_device())
        interlocks = post_validation is not None
        self.running = RunningPlan(plan, replanner, self._make_executor, post_validation=interlocks)
        timeout = self.connections.timeout
        self.step_plans = StepPlans(
            self.running, self.observer, planning, timeout, reorders=orders_microbatches, interlocks=interlocks
        )

    def position(self) -> Position | None:
        """Return this rank's position in a step, or None between steps; a `Watchdog` calls `position` in a thread."""
        executor = self._last_executor
        if executor is None:
            return None
        index, has_inputs = executor.position()
        if not self._is_in_step and index == len(executor.schedule.ops[executor.rank]):
            return None
        return Position(self._num_calls, self._num_steps, executor.schedule, executor.rank, index, has_inputs)

    def measured_time(self, mean_step: StepTime | None = None) -> PipelineTime:
        """Return the measured time of a step and the pipeline's idle share; a collective call of the pipeline's ranks.

        Args:
            mean_step: the result of `observer.take_mean()` on this rank; by default, `measured_time` calls
                `take_mean()`.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        steps = from_all_ranks(mean_step or self.observer.take_mean(), group)
        return PipelineTime(1e3 * max(step.span for step in steps), idle_share(steps))

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run forward and backward of one step.

        Args:
            arguments: the fields of `StepCall`, which are the arguments of megatron-core's forward-backward functions.

        Returns:
            On the rank of the last stage, the result of the loss function for each microbatch; [] on other ranks.

        Raises:
            ValueError: the configuration has a setting that zero-bubble schedules do not support.
            RuntimeError: an earlier step has failed on this rank of a pipeline of several ranks.
        """
        call = StepCall(**arguments)
        if self._has_lost_messages:
            raise RuntimeError("an earlier step failed, and its messages may arrive in this step: restart the job")
        if not (call.forward_only and torch.is_inference_mode_enabled()):
            return self._call(call)
        # Tensors that later steps use, or that another thread changes, must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            return self._call(call)

    def _call(self, call: StepCall) -> list[Any]:
        trained = [] if call.forward_only else call.chunks
        refuse_unsupported(call.config, trained, call.adjust_tensor_shapes_fn)
        if self._num_steps == 0:
            refuse_sharded(trained)
        self._prepare(call)
        iterators, decision = call.data_iterators, None
        if len(iterators) != len(call.chunks):
            raise ForwardStepError(
                f"data_iterator has {len(iterators)} iterators for {len(call.chunks)} model chunks: give one for each"
            )
        if not call.forward_only and self.step_plans.are_made(call.config):
            decision, iterators = self.step_plans.decide(self._num_steps + 1, call)
        executor = self.running.executor(
            call.groups.pp,
            call.num_microbatches,
            forward_only=call.forward_only,
            overlaps_reduction=call.overlaps_reduction,
            mixes_backwards=not fully_sharded(call.chunks),
            less_memory=(decision.level, decision.schedule) if decision and decision.schedule else None,
        )
        stage = self._make_stage(call, iterators, executor)
        if self.warms_up and not call.forward_only:
            warm_up(stage, self._store, computes=self.rehearses)
            self.warms_up = False
        self._run(executor, stage)
        if not call.forward_only:
            self.running.after_step(self._num_steps, call.num_microbatches)
            self.step_plans.after_step(self._num_steps)
        return stage.forward_data_store if decision is None else decision.in_data_order(stage.forward_data_store)

    def _prepare(self, call: StepCall) -> None:
        """Prepare one call of the forward-backward function.

        If necessary, `_prepare` validates the last optimizer step, adopts the next plan, and opens the collectives of
        vocabulary shards.
        """
        if self._recomputation_store is not None:
            refuse_unsplit_recomputation(call.config)
        if call.forward_only or (self._post_validation is not None and self._post_validation.waits):
            self.settle()
        if not call.forward_only:
            self.running.before_step(call.num_microbatches)
        self.connections.prepare(call.chunks, self.running.plan.placement, call.groups)
        if self.connections.shapes_vary:
            self.running.replanner.let_microbatches_differ()

    def _make_stage(self, call: StepCall, iterators: Sequence[Any], executor: Executor) -> MegatronStage:
        # megatron-core's schedule plans take additional time, so only schedules with pairs use them.
        has_pairs = self._pairs and executor.schedule.has_pairs
        return (PairedStage if has_pairs else MegatronStage)(
            call,
            iterators,
            executor.schedule.placement,
            executor.rank,
            own_device(),
            shapes_vary=self.connections.shapes_vary,
            post_validation=None if call.forward_only else self._post_validation,
            num_early_forwards=num_forwards_before_validation(executor.schedule),
            recomputation_store=self._recomputation_store,
            vocabulary=self.connections.vocabulary_step(call),
        )

    def _run(self, executor: Executor, stage: MegatronStage) -> None:
        config = stage.call.config
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        self._usual_message = stage.usual_message
        self._num_calls += 1
        self._last_executor, self._is_in_step = executor, True
        recorder = None if stage.call.forward_only else self._start_recording(stage.vocabulary)
        if isinstance(stage, PairedStage):
            stage.recorder = recorder
        try:
            executor.run(stage, recorder)
            if not executor.schedule.has_post_validation:
                stage.finish()
            self.observer.stop()
        except BaseException:
            self._has_lost_messages = self.running.plan.placement.num_ranks > 1
            self.observer.drop()
            with suppress(Exception):  # an error here must not replace the error of the step
                stage.leave()
            self._last_executor = None
            raise
        finally:
            self._is_in_step = False
            # A timer waits for the device, where messages of a failed step may never arrive.
            if config.timers is not None and not self._has_lost_messages:
                config.timers("forward-backward").stop()

    def settle(self) -> None:
        """Validate the last optimizer step now, if post-validation has not validated this step yet.

        Call `settle` on every rank before code outside of a training step reads parameters or the optimizer.
        """
        if self._post_validation is not None:
            self._post_validation.validate()

    def close(self) -> None:
        """Close the connections and end the planning process, before the job's process groups are destroyed."""
        self.step_plans.close()
        self.connections.close()
        self.running.drop_executors()

    def _start_recording(self, vocabulary: VocabularyStep | None) -> OpRecorder:
        self._num_steps += 1
        meter = None
        if self.running.replanner.measures_memory(self._num_steps):
            kept_by_shard = None if vocabulary is None else vocabulary.kept_bytes
            meter = memory_meter(own_device(), self._store, kept_by_shard, self._offload_store)
        return self.observer.start(self._num_steps, meter)

    def _measure_messages(self) -> tuple[dict[int, float], float]:
        assert self._usual_message is not None
        return self.connections.measure_messages(self.running.plan.placement, self._rank, self._usual_message)

    def _make_executor(self, schedule: Schedule, group: dist.ProcessGroup, *, tail_by_parameter: bool) -> Executor:
        assert schedule.num_ranks == group.size(), "a plan for another pipeline size"
        lane = self.connections.exchange_lane
        return Executor(
            joined_early(schedule) if lane is not None and lane.waits_in_thread else schedule,
            group.rank(),
            self.connections.channels(schedule, group),
            self._store,
            self._recomputation_store,
            tail_by_parameter=tail_by_parameter,
            offload_store=self._offload_store,
            exchange_lane=lane,
        )
