"""Makes the objects that run a job: forward-backward function, post-validation, and averaging of the replicas."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.mcore.connections import Connections
from megatron.zero_bubble.mcore.model_units import Unit, UnitModels
from megatron.zero_bubble.mcore.optimizer import refuse_optimizer, torch_optimizers
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.replica_averaging import ReplicaAveraging
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.mcore.step_call import message_shape
from megatron.zero_bubble.mcore.unit_costs import SECONDS, count_states, measure_model
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.communicator import HostCommunicator, TensorSpec, TorchCommunicator
from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.runtime.recorder import device_clock
from megatron.zero_bubble.runtime.replica_waits import ReplicaWaits, Waits
from megatron.zero_bubble.runtime.rollback import make_rollback
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Schedule
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.model_costs import ModelCosts, with_states
from megatron.zero_bubble.session.environment import shared_cores
from megatron.zero_bubble.session.features import (
    HIERARCHICAL_SGD,
    INVERSE,
    POST_VALIDATION,
    USE_SNAPSHOT,
    gain_of_post_validation,
)
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.model_states import Parameters, ReplicaCounts, States
from megatron.zero_bubble.session.plans import other_numbers_line
from megatron.zero_bubble.session.profiled_costs import fit_units
from megatron.zero_bubble.session.profiling import report_plan, too_short_to_profile, unused_window
from megatron.zero_bubble.session.reports import channels_line, describe_hierarchy, print_rank_0, without_gain
from megatron.zero_bubble.session.settings import JobSettings


def run_plan(
    job: JobSettings,
    store: WeightGradStore,
    iteration: int,
    post_validation: PostValidation | None = None,
    write_plan: Callable[[Report], None] = lambda report: None,
) -> ForwardBackward:
    """The job's forward-backward function, which runs schedules, and measures and plans again as set by `job.planning`.

    Args:
        iteration: the iteration after which the job begins.
        write_plan: function to call on every rank with each plan from measured costs, after the plan is printed.
    """
    assert job.plan is not None
    flags = job.flags
    for line in (too_short_to_profile(flags, iteration), unused_window(flags, job.planning)):
        if line is not None:
            print_rank_0(line)
    if flags.zero_bubble_communicator == "host":
        print_rank_0(" > messages between stages go through host memory (--zero-bubble-communicator host)")

    def warn_of_order(schedule: Schedule) -> None:
        if flags.rank == 0 and (line := other_numbers_line(flags, schedule)):
            print_rank_0(line)

    def report(plan: Report) -> None:
        report_plan(flags, plan)
        warn_of_order(plan.prediction.schedule)
        write_plan(plan)

    if job.plan.adapts and flags.rank == 0:  # other ranks need not plan this schedule
        warn_of_order(job.plan.schedule(flags.most_microbatches))
    return ForwardBackward(
        job.plan,
        store,
        Connections(
            communicator_of(flags),
            timedelta(minutes=flags.distributed_timeout_minutes),
            report=lambda memory: print_rank_0(channels_line(memory)),
        ),
        planning=job.planning,
        report=report,
        post_validation=post_validation,
        pairs=flags.pairs,
        orders_microbatches={"planned": True, "data": False}.get(flags.zero_bubble_microbatch_order or ""),
    )


def communicator_of(flags: JobFlags) -> type[TorchCommunicator]:
    """The class that sends messages between stages: through host memory, or over the job's backend."""
    return HostCommunicator if flags.zero_bubble_communicator == "host" else TorchCommunicator


def units_of(
    settings: Any,
    config: TransformerConfig,
    build: Callable[[Unit, WeightGradStore], torch.nn.Module],
    forward_step: Callable[..., Any],
    microbatch: Mapping[str, torch.Tensor],
) -> UnitModels:
    """Make the `UnitModels` for measuring the costs of embedding, layers and output; the process groups must exist.

    Args:
        settings: an object with Megatron's flags and the zero-bubble flags as attributes.
        config: the configuration of the model.
        build: function that builds the embedding, a layer or the output (see `UnitModels`).
        forward_step: the forward step of the training.
        microbatch: the microbatch that `forward_step` reads from its data in every call.
    """
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    shape = message_shape(
        config,
        *groups,
        seq_length=settings.seq_length,
        micro_batch_size=settings.micro_batch_size,
        decoder_seq_length=getattr(settings, "decoder_seq_length", None),
    )
    experts = parallel_state.get_expert_data_parallel_world_size()
    states, replicas = States.of(settings), ReplicaCounts(settings.data_parallel_size * groups[1].size(), experts)
    device = torch.device(torch.cuda.current_device())
    return UnitModels(
        build=build,
        forward_step=forward_step,
        data=itertools.repeat(microbatch),
        message=TensorSpec(shape, config.pipeline_dtype or torch.float32, device),
        state_bytes=lambda dense, expert: states.of_rank(Parameters(dense, expert), replicas),
    )


def costs_of_units(
    flags: JobFlags,
    models: UnitModels,
    kinds: Sequence[int],
    profile: Profile | None = None,
    seconds: float = SECONDS,
) -> ModelCosts:
    """The costs of embedding, layers and output, and of a message between stages; a collective call of all ranks.

    The costs of F and B exclude full recomputation.

    Args:
        kinds: for each layer of the model, the index of its kind, as in `Unit.layer`.
        profile: the profile of an earlier run of the model, perhaps in another layout; None to measure the costs.
        seconds: total duration of the measurement, see `measure_model`.

    Returns:
        The costs, which are the same on every rank.

    Raises:
        ScheduleError: the profile does not determine the costs.
    """
    if profile is not None:
        return with_states(fit_units(profile, kinds), count_states(models, kinds))
    print_rank_0(f" > timing the model's layers for {seconds:g} seconds, to choose their layout ...")
    if models.message.device.type == "cpu" and (shares := shared_cores(os.environ, os.cpu_count() or 1)):
        print_rank_0(f" > {shares}")
    timeout = timedelta(minutes=flags.distributed_timeout_minutes)
    pairs = flags.overlap_moe_expert_parallel_comm
    costs, ratio = measure_model(models, kinds, communicator_of(flags), timeout, seconds, pairs=pairs)
    if ratio is not None and not costs.has_all_to_all:
        print_rank_0(f" > {without_gain(ratio)}")
    return costs


def build_post_validation(
    flags: JobFlags, plan: RunSchedules | None, optimizer: MegatronOptimizer, model: Sequence[Any]
) -> PostValidation | None:
    """The `PostValidation` of an optimizer; None if no flag asks for post-validation, or if the pipeline has one rank.

    Raises:
        ValueError: post-validation does not support the optimizer, or the rollback cannot invert the optimizer's steps.
    """
    if not flags.zero_bubble_post_validation:
        return None
    if flags.pipeline_model_parallel_size == 1:
        print_rank_0(
            f" > {POST_VALIDATION} has no effect with --pipeline-model-parallel-size 1: no rank waits for another stage"
        )
        return None
    assert plan is not None, "checked with the flags"
    try:
        refuse_optimizer(optimizer)
    except ValueError as error:
        raise ValueError(f"{POST_VALIDATION}: {error}") from error
    try:
        rollback = make_rollback(
            "inverse" if flags.zero_bubble_rollback == "inverse" else "snapshot",
            torch_optimizers(optimizer),
            on_host=flags.zero_bubble_rollback_on_host,
        )
    except ValueError as error:
        raise ValueError(f"{INVERSE}: {error}: {USE_SNAPSHOT}") from error
    if flags.rank == 0:
        print_rank_0(gain_of_post_validation(flags, plan))
    return PostValidation(optimizer, rollback, model)


class Replicas:
    """Averages parameters over replicas under `--hierarchical-sgd`, and measures how long replicas wait for each other.

    All ranks together create their `Replicas` objects before the first step. With a single replica, a `Replicas` object
    does nothing.

    Args:
        chunks: this rank's model chunks, wrapped in DDP.
        iteration: the iteration after which the job begins.
        changed: function to call after the averaging of parameters or of the optimizer's moments.

    Raises:
        ValueError: `--hierarchical-sgd` does not work with the optimizer.
    """

    def __init__(
        self,
        job: JobSettings,
        optimizer: MegatronOptimizer,
        chunks: Sequence[Any],
        iteration: int,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._averaging: ReplicaAveraging | None = None
        if job.hierarchy is not None:
            timeout = timedelta(minutes=job.flags.distributed_timeout_minutes)
            try:
                self._averaging = ReplicaAveraging(job.hierarchy, optimizer, chunks, iteration, timeout, changed)
            except ValueError as error:
                raise ValueError(f"{HIERARCHICAL_SGD} {job.flags.hierarchical_sgd}: {error}") from error
            print_rank_0(describe_hierarchy(job.hierarchy))
        group = parallel_state.get_data_parallel_group()
        self._num_replicas = group.size()
        self._waits = ReplicaWaits(group, device_clock(own_device()))
        # In a job that only evaluates, chunks are not in DDP.
        for chunk in chunks if self._num_replicas > 1 and hasattr(chunks[0], "finish_grad_sync") else ():
            chunk.finish_grad_sync = self._measured(chunk.finish_grad_sync)

    def _measured(self, reduce: Callable[..., None]) -> Callable[..., None]:
        @wraps(reduce)
        def measured(*args: Any, **kwargs: Any) -> None:
            with self._waits.measured():
                reduce(*args, **kwargs)

        return measured

    @property
    def is_local(self) -> bool:
        """Whether each replica has its own loss, gradient norm and optimizer step in the next iteration."""
        return self._averaging is not None and self._averaging.is_local

    def changes_after(self, iteration: int) -> bool:
        """Whether `after_step(iteration)` averages parameters, or ends the warmup of hierarchical SGD.

        If `changes_after` returns True, the training loop must validate the optimizer step and call `after_step` before
        it begins the next iteration.
        """
        if self._averaging is None:
            return False
        hierarchy = self._averaging.hierarchy
        return hierarchy.group_size_after(iteration) is not None or iteration == hierarchy.warmup

    def after_step(self, iteration: int) -> None:
        """Average parameters if hierarchical SGD averages after `iteration`; a collective call of all replicas."""
        size = self._num_replicas
        if self._averaging is not None:
            with self._waits.measured():
                averaged = self._averaging.after_step(iteration)
            if self._averaging.hierarchy.is_local(iteration):
                size = averaged
        if self._num_replicas > 1:
            self._waits.end_iteration(size)

    def average_all(self, iteration: int, *, with_states: bool = False) -> None:
        """Give all replicas the same parameters and, if `with_states` is set, the same optimizer states."""
        if self._averaging is not None:
            self._averaging.average_all(iteration, with_states=with_states)

    def take_waits(self) -> Waits | None:
        """Time that each replica has waited for others since the last `take_waits`; a collective call of the replicas.

        `take_waits` returns None if no iteration has ended since the last call, or if there is only one replica.
        """
        return self._waits.take() if self._num_replicas > 1 else None
