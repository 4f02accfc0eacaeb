"""Splits a list of layers over ranks and trains the layers with any schedule.

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
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron.zero_bubble.pipeline.batches import Load, microbatches_of
from megatron.zero_bubble.pipeline.gradients import average_over, total_norm
from megatron.zero_bubble.pipeline.held_layers import Summary, Unsplit
from megatron.zero_bubble.pipeline.interconnect import Agreement, Interconnect, connect_ranks, refuse_shared_gpu
from megatron.zero_bubble.pipeline.late_steps import LateSteps, TrainingOutcome, take_step
from megatron.zero_bubble.pipeline.layer_costs import LayerTimes, stage_times
from megatron.zero_bubble.pipeline.options import (
    PipelineOptions,
    check_same_arguments,
    check_step,
    check_types,
    refuse_line_search,
)
from megatron.zero_bubble.pipeline.partial_model import PartialModel
from megatron.zero_bubble.pipeline.rank_steps import RankSteps
from megatron.zero_bubble.pipeline.specs import tie_of
from megatron.zero_bubble.pipeline.stage_layout import LayoutRequest
from megatron.zero_bubble.runtime.joint import attempt, from_all_ranks
from megatron.zero_bubble.runtime.recorder import OpRecorder, device_clock
from megatron.zero_bubble.schedule import Schedule

T = TypeVar("T")

logger = logging.getLogger("megatron.zero_bubble")


class Pipeline(PartialModel):
    """A `torch.nn.Sequential` whose layers are spread over ranks.

    As an `nn.Module`, a `Pipeline` holds the layers of this rank. The names of the layers are the names
    in `torch.nn.Sequential(*layers)`. Every method that trains or evaluates the model, clips gradients or gathers the
    model's state is a collective call of all ranks of the pipeline.

    Args:
        layers: list of modules, functions, `LayerSpec`s and `TiedLayerSpec`s, the same on all ranks.
        loss_fn: function that returns the loss of a microbatch, as a tensor with one number, given the last layer's
            output and the targets.
        schedule: a `Schedule`, or the name of a schedule (see `megatron.zero_bubble.planner.names()`).
        num_microbatches: number of microbatches in a step.
        options: settings of the partition, memory limit, recomputation, shapes and post-validation.
        group: process group of the pipeline's ranks, by default all ranks of the job.
        replicas: process group of the ranks that hold the same stages as this rank, with one rank of each replica of
            the pipeline. Gradients are averaged over the group `replicas`.
        interconnect: the connections between the ranks, by default `connect_ranks(group)`. For another device or
            timeout, pass the result of `connect_ranks(group, device, timeout)`, and no `group`. Several pipelines may
            use one `interconnect`.

    Raises:
        ValueError: on all ranks, if the layers cannot be partitioned or built, or the schedule cannot be made.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        schedule: str | Schedule = "zb-v",
        num_microbatches: int = 8,
        options: PipelineOptions = PipelineOptions(),  # noqa: B008 (frozen)
        *,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        interconnect: Interconnect | None = None,
    ) -> None:
        super().__init__()
        check_types(layers, loss_fn, options)
        if group is not None and interconnect is not None:
            raise ValueError("group and interconnect are both given: give the group to connect_ranks only")
        layers, interconnect = list(layers), (interconnect or connect_ranks(group)).of_one_pipeline()
        # A gloo group that is open while the interpreter ends may abort the process.
        self._close = weakref.finalize(self, interconnect.close)
        self._rank, self._replicas = interconnect.rank, replicas
        self.device, self.num_microbatches = interconnect.device, num_microbatches
        self._agreement = Agreement(interconnect)
        refuse_shared_gpu(self._agreement, interconnect.device)
        arguments = {"num_microbatches": num_microbatches, "schedule": schedule, **options.compared()}
        check_same_arguments(self._agreement, layers, arguments)
        size = interconnect.size
        request = LayoutRequest(layers, loss_fn, schedule, num_microbatches, options, size, self.device)
        # One rank plans, so that all ranks get the same schedule or raise the same error.
        self.layout = self._agreement.on(0, request.layout)
        self._steps = RankSteps(layers, loss_fn, self.layout, options, interconnect, self._agreement)
        self._hold(self._steps.held, self._steps.tied, [tie_of(layer) for layer in layers])
        self._late = LateSteps(self._steps, interconnect, self) if options.post_validation else None
        own = sum(parameter.numel() for parameter in self.own_parameters())
        counts = self._agreement.gather((self._steps.held.unsplit, own))
        unsplit = sum((unsplit for unsplit, _ in counts), start=Unsplit())
        self._summary = Summary(self.layout, unsplit, sum(count for _, count in counts))
        if replicas is not None:
            self._copy_first(replicas)
        if self._rank == 0 and (replicas is None or replicas.rank() == 0):
            logger.info(self.summary())
            if notice := self._summary.notice():
                logger.warning(notice)

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        return self.layout.schedule

    def train_batch(self, batch: Any = None) -> torch.Tensor:
        """Run the forwards and backwards of one step; every rank returns the mean loss of the step's microbatches.

        The gradients of the mean loss, averaged over replicas, are added to the parameters' `.grad`.

        Args:
            batch: a pair (inputs, targets), split into microbatches along the first dimension of all tensors, or an
                iterator that yields one such pair for each microbatch. A rank that holds neither the first nor the last
                stage ignores the batch.

        Raises:
            ValueError: on all ranks of all replicas, if the batch is invalid, or the forward or backward of a layer
                fails; also inside a closure of `torch.optim.LBFGS`.
        """
        return self._train(batch)

    def train_step(
        self, batch: Any, optimizer: torch.optim.Optimizer, max_norm: float = math.inf
    ) -> TrainingOutcome | None:
        """Run `train_batch`, clip gradients, run the optimizer and drop gradients; return the loss and the gradient
        norm.

        With post-validation, `train_step` does not wait for the gradient norms of other ranks. `train_step` returns the
        outcome of the previous training step, or None in the first training step and after a call of `settle`. If a
        training step with post-validation fails, the next call of `train_step` raises `ValueError`, and the pipeline
        cannot be used any more.

        Raises:
            ValueError: on all ranks of the pipeline, if the batch is invalid, the forward or backward of a layer fails,
                or the optimizer's step fails or needs a closure; on this rank, if an argument has a wrong type.
        """
        check_step(optimizer, max_norm, post_validation=self._late is not None)
        if self._late is None:
            loss = self.train_batch(batch)
            with torch.autocast(self.device.type, enabled=False):
                outcome = TrainingOutcome(loss, self.clip_grad_norm_(max_norm))
                self._agreement.raise_any(take_step(optimizer))
            optimizer.zero_grad()
            return outcome
        load, run = self._load_to_train(batch), self._late.run
        with torch.enable_grad():
            self._in_all_replicas(lambda: run(load, optimizer))
        with torch.autocast(self.device.type, enabled=False):
            self._sum_gradients()
            self._late.step(optimizer, max_norm)
        return self._late.take_outcome()

    def settle(self) -> TrainingOutcome | None:
        """Validate the last training step, and return the outcome of the step; None if the outcome was returned before.

        Call `settle` before code outside the pipeline reads parameters or the optimizer's state. Methods of
        `Pipeline` that train, evaluate, or return or load a state dict validate the last training step themselves.
        """
        self._validate()
        return self._late.take_outcome() if self._late is not None else None

    def _validate(self) -> None:
        if self._late is not None:
            self._late.validate()

    def stage_times(self, batch: Any = None) -> list[LayerTimes]:
        """Run `train_batch`; every rank returns the median times of a microbatch's F, B and W on each stage."""
        recorder = OpRecorder(device_clock(self.device))
        self._train(batch, recorder)
        own = stage_times(recorder.take(), self.schedule.placement, self._rank)
        of_all = ChainMap(*self._agreement.gather(own))
        return [of_all[stage] for stage in range(self.schedule.num_stages)]

    def _train(self, batch: Any, recorder: OpRecorder | None = None) -> torch.Tensor:
        load = self._load_to_train(batch)

        def run() -> torch.Tensor:
            self._validate()
            return self._steps.train(load, recorder)

        loss = self._in_all_replicas(run)
        self._sum_gradients()
        return loss

    def _in_all_replicas(self, run: Callable[[], T]) -> T:
        """Run the forwards and backwards of a step; raise an error of one replica in all replicas."""
        if self._replicas is None:
            return run()
        result, error = attempt(run)
        for replica, problem in enumerate(from_all_ranks(error and str(error), self._replicas)):
            if problem is not None:
                raise ValueError(f"replica {replica}: {problem}") from (error and error.__cause__)
        return cast(T, result)

    def _load(self, batch: Any) -> Load:
        self._agreement.check_open()
        return partial(microbatches_of, batch, self.num_microbatches, self.device)

    def _load_to_train(self, batch: Any) -> Load:
        if torch.is_inference_mode_enabled():
            raise ValueError("torch.inference_mode() allows no gradients: train outside it")
        refuse_line_search()
        return self._load(batch)

    def _sum_gradients(self) -> None:
        for tied in self._steps.tied:
            tied.end_step()
        if self._replicas is not None:
            average_over(self._replicas, self.own_parameters())

    def eval_batch(self, batch: Any = None) -> torch.Tensor:
        """Run the forwards of one step in evaluation mode; every rank returns the mean loss of the step's microbatches.

        `batch` has the same form as in `train_batch`.
        """
        # Buffers of messages and states of the optimizer, which later steps use, must not become inference tensors.
        with torch.inference_mode(False):
            self._validate()
            modes = {module: module.training for module in self.modules()}
            self.eval()
            try:
                return self._steps.evaluate(self._load(batch))
            finally:
                # A module may do more in `train` than set its mode; parents come before their children.
                for module, is_training in modes.items():
                    if module.training != is_training:
                        module.train(is_training)
                for module, is_training in modes.items():
                    module.training = is_training

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Validate the last training step; return the state of this rank's layers like `torch.nn.Module.state_dict`."""
        self._validate()
        return super().state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Validate the last training step; load this rank's layers from a state that may contain other layers."""
        self._validate()
        return super().load_state_dict(state_dict, strict, assign)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; return the norm before scaling.

        The norm equals the result of `torch.nn.utils.clip_grad_norm_` for the whole model; every tied parameter
        counts once. With `max_norm=math.inf`, gradients do not change, even if the norm is not finite.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        of_ranks = self._agreement.gather(self.gradient_norms(norm_type))
        total = total_norm(list(chain(*of_ranks)), self.device, norm_type)
        if any(of_ranks) and max_norm != math.inf:
            nn.utils.clip_grads_with_norm_(self.own_parameters(), max_norm, total)
        return total

    def summary(self) -> str:
        """Return a text with the layers of every stage, and the module classes whose weight gradients B computes."""
        return self._summary.text()

    def close(self) -> None:
        """Close the connections between ranks; by default, they close when the pipeline is freed or Python exits."""
        if self._late is not None:
            self._late.close()
        self._agreement.close()
        self._close()
