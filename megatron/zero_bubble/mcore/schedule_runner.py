"""Runs forward and backward of a step with the schedules of a plan, in place of megatron-core's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as mcore
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.zero_bubble.mcore.connections import Connections
from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.microbatch_orders import JobPeers, StepData
from megatron.zero_bubble.mcore.paired_stage import PairedStage
from megatron.zero_bubble.mcore.placement import finalize_gradients
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.step_settings import (
    default_groups,
    overlaps_reduction,
    refuse_unsplit_recomputation,
    refuse_unsupported,
)
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep
from megatron.zero_bubble.mcore.warm_up import warm_up
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.channel_memory import ChannelCommunicator, ChannelMemory
from megatron.zero_bubble.runtime.communicator import TensorSpec, TorchCommunicator
from megatron.zero_bubble.runtime.copy_lane import copy_lane
from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.memory_meter import memory_meter
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import OpRecorder, StepTime, device_clock, idle_share
from megatron.zero_bubble.runtime.replanner import PlanningOptions, Replanner, Report
from megatron.zero_bubble.runtime.run_costs import RunCosts
from megatron.zero_bubble.runtime.running_plan import RunningPlan
from megatron.zero_bubble.runtime.step_planner import (
    FIRST_STEPS,
    OrderTimes,
    StepDecision,
    StepPlanner,
    whole_limits,
)
from megatron.zero_bubble.runtime.watchdog import Position
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Idle, Schedule, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.step_ops import num_forwards_before_validation

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Time after which a missing message between two stages fails the job: megatron-core's default."""


class ForwardBackward:
    """Runs forward and backward of all microbatches of a step with the schedules of a plan.

    Schedules are generated, lowered and validated once for each number of microbatches, and kept.
    The process groups of the channels are created at the first call.

    Args:
        planning: profile the run and plan again from measured costs; None keeps the plan.
        report: called with each decision of that planning, on every rank.
        post_validation: takes the optimizer's steps within the schedule; None if they come after it.
        communicator: the class of the channels.
        report_channels: called with the channels' memory once they are open.
        pairs: whether a forward and a backward may run as one (see `PairedStage`).
        orders_microbatches: whether the microbatches of a step that differ in size run in an order that is planned for
            their sizes (see `StepPlanner`); by default they do where the model's configuration says
            `variable_seq_lengths`.
        warms_up: whether each stage computes once before the first training step (see `mcore/warm_up.py`); by default
            it does on a GPU only.
    """

    def __init__(
        self,
        plan: RunSchedules,
        store: WeightGradStore,
        timeout: timedelta = DEFAULT_TIMEOUT,
        planning: PlanningOptions | None = None,
        report: Callable[[Report], None] = lambda report: None,
        post_validation: PostValidation | None = None,
        communicator: type[ChannelCommunicator] = TorchCommunicator,
        report_channels: Callable[[ChannelMemory], None] = lambda memory: None,
        warms_up: bool | None = None,
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
        # Where the schedule has no R, B recomputes as the model's configuration says.
        self._recomputation_store = None if plan.recompute is Recompute.NONE else RecomputationStore()
        self._offload_store = OffloadStore(copy_lane(own_device())) if plan.offloads else None
        self._post_validation = post_validation
        self._stage_class = PairedStage if pairs else MegatronStage
        self._connections = Connections(communicator, timeout, report_channels)
        self._usual_message: TensorSpec | None = None
        self._rank = parallel_state.get_pipeline_model_parallel_rank()
        self._num_calls, self._num_steps = 0, 0
        self._is_to_warm_up = own_device().type == "cuda" if warms_up is None else warms_up
        self._last_executor: Executor | None = None
        self._is_in_step = False
        self.observer = StepObserver(device_clock(own_device()))
        replanner = None
        if planning is not None:
            measured = RunCosts(
                *(plan.placement, self._rank, self.observer, self._measure_edges),
                recomputation=self._recomputation_store,
                offload=self._offload_store,
            )
            replanner = Replanner(plan, planning, measured, report, own_device())
        self._orders_microbatches, self._planning, self._timeout = orders_microbatches, planning, timeout
        self._step_planner: StepPlanner | None = None
        self._running = RunningPlan(plan, replanner, self._make_executor, post_validation=post_validation is not None)

    @property
    def plan(self) -> RunSchedules:
        """The current plan."""
        return self._running.plan

    @property
    def profile(self) -> Profile | None:
        """The measured costs that the present plan was made from; None before the run is profiled."""
        return self._running.profile

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a training step, as it runs at present."""
        return self._running.schedule(num_microbatches)

    def position(self) -> Position | None:
        """Return where this rank is in a step, None between two steps; a `Watchdog` calls it from another thread."""
        executor = self._last_executor
        if executor is None:
            return None
        index, has_inputs = executor.position()
        if not self._is_in_step and index == len(executor.schedule.ops[executor.rank]):
            return None
        return Position(self._num_calls, self._num_steps, executor.schedule, executor.rank, index, has_inputs)

    def measured_idle(self, mean_step: StepTime | None = None) -> Idle:
        """Return the measured idle share of the pipeline; a collective call of its ranks.

        Args:
            mean_step: the result of `observer.take_mean()` on this rank; None calls it.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        steps: list[StepTime] = [mean_step or self.observer.take_mean()] * group.size()
        dist.all_gather_object(steps, steps[0], group=group)
        return idle_share(steps)

    def prediction(self, num_microbatches: int) -> Prediction | None:
        """Return the simulated timeline of the current schedule at measured costs; None before costs are measured."""
        return self._running.prediction(num_microbatches)

    def predicted_idle(self, num_microbatches: int) -> Idle | None:
        """Return the idle share of that prediction."""
        prediction = self.prediction(num_microbatches)
        return None if prediction is None else prediction.idle

    @property
    def shapes_vary(self) -> bool:
        """Whether microbatches may differ in shape; known once a step has begun."""
        return self._connections.shapes_vary

    def take_order_times(self) -> OrderTimes | None:
        """Return the predicted times of the steps since the last call whose order of microbatches was planned."""
        return None if self._step_planner is None else self._step_planner.take_times()

    def __call__(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run forward and backward of one step.

        The arguments are those of megatron-core's forward-backward functions. `p2p_communicator` is not used, because
        messages go through the project's own channels.

        Returns: The results of the loss function for each microbatch, on the rank that holds the last stage.

        Raises:
            ValueError: the configuration has a setting that zero-bubble schedules cannot honour.
        """
        chunks = list(model) if isinstance(model, Sequence) else [model]
        iterators = list(data_iterator) if isinstance(data_iterator, Sequence) else [data_iterator]
        config = get_model_config(chunks[0])
        refuse_unsupported(config, chunks, adjust_tensor_shapes_fn)
        if self._recomputation_store is not None:
            refuse_unsplit_recomputation(config)
        groups = pg_collection or default_groups()
        if forward_only:
            self.settle()
        else:
            self._running.before_step(num_microbatches)
        self._connections.prepare(chunks, self.plan.placement, groups)
        if self._connections.shapes_vary:
            self._running.let_microbatches_differ()
        decision = None
        if not forward_only and self._plans_steps(config):
            data = StepData(iterators, num_microbatches)
            decision = self._decide(data, num_microbatches, reorders=self._reorders(config))
            iterators = data.ordered(decision)
        executor = self._running.executor(
            groups.pp,
            num_microbatches,
            forward_only=forward_only,
            overlaps_reduction=overlaps_reduction(chunks, groups),
            less_memory=(decision.level, decision.schedule) if decision and decision.schedule else None,
        )
        shapes = mcore.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        stage = self._stage_class(
            forward_step_func=forward_step_func,
            data_iterators=iterators,
            model_chunks=chunks,
            placement=executor.schedule.placement,
            rank=executor.rank,
            num_microbatches=num_microbatches,
            output_shape=tuple(shapes[0]),
            shapes_vary=self._connections.shapes_vary,
            cp_group_size=groups.cp.size(),
            device=own_device(),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            finalize=partial(self._finalize, groups=groups, force_all_reduce=force_all_reduce),
            post_validation=None if forward_only else self._post_validation,
            num_early_forwards=num_forwards_before_validation(executor.schedule),
            recomputation_store=self._recomputation_store,
            vocabulary=self._connections.vocabulary_step(num_microbatches, tuple(shapes[0]), forward_only=forward_only),
        )
        if self._is_to_warm_up and not forward_only:
            self._is_to_warm_up = False
            warm_up(stage, self._store, groups)
        self._run(executor, stage)
        if not forward_only:
            self._running.after_step(self._num_steps, num_microbatches)
            if self._step_planner is not None:
                self._step_planner.after_step(self._num_steps, self._usual_costs)
        return stage.forward_data_store if decision is None else decision.in_data_order(stage.forward_data_store)

    def _usual_costs(self) -> StageCosts:
        plan, profile = self._running.plan, self._running.profile
        return (plan.costs if profile is None else profile.costs) or default_costs(plan.placement, plan.recompute)

    def _reorders(self, config: Any) -> bool:
        """Whether the microbatches of a step may run in another order."""
        return config.variable_seq_lengths if self._orders_microbatches is None else self._orders_microbatches

    def _plans_steps(self, config: Any) -> bool:
        """Whether the microbatches of a step are read before it, to plan it."""
        return self._reorders(config) or (config.variable_seq_lengths and self._has_limit)

    @property
    def _has_limit(self) -> bool:
        return self._planning is not None and self._planning.has_absolute_limit

    def _decide(self, data: StepData, num_microbatches: int, *, reorders: bool) -> StepDecision:
        """Plan a training step for the sizes of its microbatches."""
        plan, planning, profile = self._running.plan, self._planning, self._running.profile
        if self._step_planner is None:
            is_profiled = planning is not None and planning.last_step > 0
            measured = (planning.first_step, planning.last_step) if planning and is_profiled else FIRST_STEPS
            peers = JobPeers(self._timeout)
            self._step_planner = StepPlanner(plan.placement, self._rank, self.observer, measured, peers)
        limits = None
        if self._has_limit and profile is not None and plan.request.limits:
            limits = whole_limits(plan.request.limits, profile.inside_ranks)
        return self._step_planner.decide(
            self._num_steps + 1,
            data.sizes,
            plan,
            num_microbatches,
            limits,
            reorders=reorders,
            interlocks=self._post_validation is not None,
        )

    def _run(self, executor: Executor, stage: MegatronStage) -> None:
        config = get_model_config(stage.model_chunks[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        self._usual_message = stage.usual_message
        self._num_calls += 1
        self._last_executor, self._is_in_step = executor, True
        recorder = None if stage.forward_only else self._start_recording(stage.vocabulary)
        if isinstance(stage, PairedStage):
            stage.recorder = recorder
        executor.run(stage, recorder)
        if not executor.schedule.has_post_validation:
            stage.finish()
        self._is_in_step = False
        self.observer.stop()
        if config.timers is not None:
            config.timers("forward-backward").stop()

    def settle(self) -> None:
        """Validate the last step now if a schedule with post-validation has not validated it yet.

        Call it on every rank before anything but a training step reads parameters or the optimizer.
        """
        if self._post_validation is not None:
            self._post_validation.validate()

    def _finalize(self, stage: MegatronStage, *, groups: ProcessGroupCollection, force_all_reduce: bool | None) -> None:
        config, chunks = get_model_config(stage.model_chunks[0]), list(stage.model_chunks)
        if config.finalize_model_grads_func is not None and not stage.forward_only:
            num_tokens = stage.num_tokens if config.calculate_per_token_loss else None
            finalize_gradients(config, stage.placement, chunks, num_tokens, groups, force_all_reduce)

    def close(self) -> None:
        """Close the channels, before the job's process groups are destroyed."""
        self._connections.close()
        self._running.drop_executors()

    def _start_recording(self, vocabulary: VocabularyStep | None) -> OpRecorder:
        self._num_steps += 1
        meter = None
        if self._running.measures_memory(self._num_steps):
            kept_by_shard = None if vocabulary is None else vocabulary.kept_bytes
            meter = memory_meter(own_device(), self._store, kept_by_shard, self._offload_store)
        return self.observer.start(self._num_steps, meter)

    def _measure_edges(self) -> dict[int, float]:
        assert self._usual_message is not None
        return self._connections.measure_edges(self.plan.placement, self._rank, self._usual_message)

    def _make_executor(self, schedule: Schedule, group: dist.ProcessGroup, *, tail_by_parameter: bool) -> Executor:
        assert schedule.num_ranks == group.size(), "a plan for another pipeline size"
        return Executor(
            schedule,
            group.rank(),
            self._connections.channels(schedule, group),
            self._store,
            self._recomputation_store,
            tail_by_parameter=tail_by_parameter,
            offload_store=self._offload_store,
            exchange_lane=self._connections.exchange_lane,
        )
