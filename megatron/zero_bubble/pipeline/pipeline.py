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
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.batches import microbatches_of
from megatron.zero_bubble.pipeline.discovery import StepMessages
from megatron.zero_bubble.pipeline.gradients import TiedLayer, average_over, clip_grad_norm
from megatron.zero_bubble.pipeline.held_layers import HeldLayers, LayerBuilder, Unsplit, stages_of_ties
from megatron.zero_bubble.pipeline.interconnect import (
    HOST,
    Agreement,
    Interconnect,
    connect_ranks,
    default_device,
)
from megatron.zero_bubble.pipeline.layer_costs import LayerTimes
from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.pipeline.layer_summary import Summary
from megatron.zero_bubble.pipeline.stage_layout import LayoutRequest, Partition, StageLayout, plan_for
from megatron.zero_bubble.pipeline.stage_times import stage_times
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import OpRecorder, device_clock
from megatron.zero_bubble.runtime.stage import Stage
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement, Schedule
from megatron.zero_bubble.schedule.plan import prepare

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Time after which a missing message or a rank missing in a collective fails the job."""

logger = logging.getLogger("megatron.zero_bubble")


class Pipeline(nn.Module):
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
            default what the schedule stands for.
        num_chunks: stages of a rank, by default those of the schedule.
        checkpoint: whether all layers drop their activations in F and run again in R. A spec says so of one layer.
        split_layers: further classes of layers whose W is split off (see `weight_split.split_modules`).
        example: inputs and targets of one microbatch, for the partition "profile".
        variable_shapes: whether layers return other shapes for a microbatch than for another one with the same shapes
            of inputs, as one that drops padding does. Microbatches whose inputs differ are noticed without it.
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
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        interconnect: Interconnect | None = None,
    ) -> None:
        super().__init__()
        self.device = default_device(group) if device is None else torch.device(device)
        self.num_microbatches = num_microbatches
        self._interconnect = interconnect or connect_ranks(group, self.device, timeout)
        # A gloo group that is open while the interpreter ends may abort the process.
        self._close = weakref.finalize(self, self._interconnect.close)
        self._rank, self._replicas = self._interconnect.rank, replicas
        self._agreement = Agreement(self._interconnect.collectives(range(self._interconnect.size), HOST))
        layers = list(layers)
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
        for layer in held.layers:
            self.add_module(str(layer.index), layer.module)
        self._stage = LayerStage(held.chunks, self._placement, self._rank, loss_fn, self.device)
        self._tied = self._tie(layers, held)
        self._messages = StepMessages(
            self._stage,
            self._placement,
            self._interconnect,
            self._agreement,
            self.device,
            shapes_vary=variable_shapes,
        )
        self._executors: dict[bool, Executor] = {}
        own = sum(parameter.numel() for parameter in self.parameters())
        counts = self._agreement.gather((held.unsplit, own))
        unsplit = sum((unsplit for unsplit, _ in counts), start=Unsplit())
        self._summary = Summary(self.layout, num_microbatches, unsplit, sum(count for _, count in counts))
        if replicas is not None:
            for tensor in (*self.parameters(), *self.buffers()):
                dist.broadcast(tensor.detach(), dist.get_process_group_ranks(replicas)[0], group=replicas)
        if self._rank == 0 and (replicas is None or replicas.rank() == 0):
            self._report()

    def _tie(self, layers: Sequence[Any], held: HeldLayers) -> list[TiedLayer]:
        """Connect the copies of layers that are tied across stages, in one order on all ranks."""
        tied = []
        for key, stages in stages_of_ties(layers, self.layout).items():
            if key in held.tied and len(stages) > 1:
                tied.append(TiedLayer(stages, held.tied[key], self._placement, self._interconnect, self.device))
        return tied

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
                iterator of the pairs of single microbatches. Ranks without the first and the last stage ignore it.

        Raises:
            ValueError: on all ranks, if the batch cannot be used.
        """
        return self._train(batch)

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
        for tied in self._tied:
            tied.end_step()
        if self._replicas is not None:
            average_over(self._replicas, list(self.parameters()))
        return loss

    def eval_batch(self, batch: Any = None) -> torch.Tensor:
        """Run the forward of one step in evaluation mode; return the mean loss on all ranks. Arguments as above."""
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            with torch.no_grad():
                return self._run(batch, trains=False)
        finally:
            for module in training:
                module.training = True

    def _run(self, batch: Any, *, trains: bool, recorder: OpRecorder | None = None) -> torch.Tensor:
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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; return the norm before.

        It is `torch.nn.utils.clip_grad_norm_` of the whole model, in which every tied parameter counts once.
        """
        copies = {parameter for tied in self._tied for parameter in tied.parameters_beyond_first}
        counted = [(_layer_of(name), own) for name, own in self.named_parameters() if own not in copies]
        return clip_grad_norm(list(self.parameters()), counted, self._agreement, max_norm, norm_type)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model on every rank, in host memory; `torch.nn.Sequential` can load it.

        For large models save `state_dict()` with `torch.distributed.checkpoint`, which writes and reads the ranks'
        parts: its names do not depend on the partition, nor on the number of ranks.
        """
        own = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in self.state_dict().items()
        }
        whole = {name: value for part in self._agreement.gather(own) for name, value in part.items()}
        return dict(sorted(whole.items(), key=lambda entry: _layer_of(entry[0])))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's layers from a state of at least them, such as that of the whole model."""
        elsewhere = set(map(str, range(self.layout.num_layers))) - set(dict(self.named_children()))
        own = {name: value for name, value in state_dict.items() if name.partition(".")[0] not in elsewhere}
        return super().load_state_dict(own, strict, assign)

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError("a Pipeline runs whole steps: call train_batch or eval_batch")

    def _report(self) -> None:
        logger.info(self.summary())
        notice = self._summary.notice()
        if notice is not None:
            logger.warning(notice)

    def summary(self) -> str:
        """Describe the partition, and list the layers whose W stays in B with their share of the parameters."""
        return self._summary.text()

    def close(self) -> None:
        """Close the connections between the ranks, which otherwise are closed with the pipeline or at exit."""
        self._close()


def _layer_of(name: str) -> int:
    """Return the index of the layer that a parameter or buffer with this name belongs to."""
    return int(name.partition(".")[0])
