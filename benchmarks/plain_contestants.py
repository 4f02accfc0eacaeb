"""Pipelines of plain PyTorch layers for `benchmarks.plain_pipelines`: this package's, torch's and DeepSpeed's."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn.functional import mse_loss

from megatron.zero_bubble import Pipeline, PipelineOptions

_LEARNING_RATE = 0.01


class PlainTraining(NamedTuple):
    """The layers and the data that all pipelines train; both are the same on all ranks."""

    layers: list[nn.Module]
    """Equal layers; their number is a multiple of the number of stages."""
    inputs: torch.Tensor
    targets: torch.Tensor
    num_microbatches: int


class PlainPipeline(Protocol):
    """One rank of a pipeline that trains copies of `PlainTraining.layers`."""

    def step(self) -> torch.Tensor | None:
        """Train with one batch, including the optimizer step; return the mean loss, or None on some ranks."""
        ...

    def settle(self) -> None:
        """Complete the work that steps have left to do, such as a post-validation."""
        return


def linear_training(num_microbatches: int) -> PlainTraining:
    """Return a training of eight linear layers with a million parameters each, for microbatches of 256 vectors."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]
    inputs, targets = torch.randn(2, 256 * num_microbatches, 1024)
    return PlainTraining(layers, inputs, targets, num_microbatches)


def convolution_training(num_microbatches: int) -> PlainTraining:
    """Return a training of eight convolutions with 64 channels, for microbatches of eight images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(8)]
    inputs, targets = torch.randn(2, 8 * num_microbatches, 64, 32, 32)
    return PlainTraining(layers, inputs, targets, num_microbatches)


TRAININGS = {"linear": linear_training, "convolution": convolution_training}


class OneProcess(PlainPipeline):
    """All layers in one process under autograd; every rank runs all layers for itself."""

    def __init__(self, training: PlainTraining) -> None:
        self._training = training
        self._model = nn.Sequential(*copy.deepcopy(training.layers))
        self._optimizer = _optimizer(self._model.parameters())

    def step(self) -> torch.Tensor:
        count = self._training.num_microbatches
        losses = []
        for inputs, targets in zip(
            self._training.inputs.chunk(count), self._training.targets.chunk(count), strict=True
        ):
            loss = mse_loss(self._model(inputs), targets) / count
            loss.backward()
            losses.append(loss.detach())
        _take(self._optimizer)
        return torch.stack(losses).sum()


class OwnPipeline(PlainPipeline):
    """This package's `Pipeline`; with post-validation, a step returns the loss of the previous step."""

    def __init__(self, training: PlainTraining, schedule: str, *, post_validation: bool = False) -> None:
        self._batch = training.inputs, training.targets
        layers, count = copy.deepcopy(training.layers), training.num_microbatches
        options = PipelineOptions(partition="uniform", post_validation=post_validation)
        self._pipeline = Pipeline(layers, mse_loss, schedule, count, options)
        self._optimizer = _optimizer(self._pipeline.parameters())
        self._is_late = post_validation

    def step(self) -> torch.Tensor | None:
        if not self._is_late:
            loss = self._pipeline.train_batch(self._batch)
            _take(self._optimizer)
            return loss
        outcome = self._pipeline.train_step(self._batch, self._optimizer)
        return None if outcome is None else outcome.loss

    def settle(self) -> None:
        self._pipeline.settle()


class TorchPipeline(PlainPipeline):
    """A schedule of torch.distributed.pipelining."""

    def __init__(self, training: PlainTraining, *, is_v: bool) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        places = [rank, 2 * size - 1 - rank] if is_v else [rank]
        count = size * len(places)
        length = len(training.layers) // count
        modules = [nn.Sequential(*copy.deepcopy(training.layers[p * length : (p + 1) * length])) for p in places]
        device = training.inputs.device
        stages: list[Any] = [
            PipelineStage(module, place, count, device) for module, place in zip(modules, places, strict=True)
        ]
        if is_v:
            self._schedule: Any = ScheduleZBVZeroBubble(stages, training.num_microbatches, loss_fn=mse_loss)
        else:
            self._schedule = Schedule1F1B(stages[0], training.num_microbatches, loss_fn=mse_loss)
        self._inputs = (training.inputs,) if 0 in places else ()
        self._targets = training.targets if count - 1 in places else None
        self._optimizer = _optimizer(parameter for module in modules for parameter in module.parameters())

    def step(self) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        self._schedule.step(*self._inputs, target=self._targets, losses=losses, return_outputs=False)
        _take(self._optimizer)
        return torch.stack(losses).mean().detach() if losses else None


class DeepSpeedPipeline(PlainPipeline):
    """DeepSpeed's `PipelineModule` or `DualPipeVModule`; DeepSpeed's engine also takes the optimizer step."""

    def __init__(self, training: PlainTraining, module_class: str) -> None:
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed

            deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
            module = getattr(deepspeed.pipe, module_class)(
                copy.deepcopy(training.layers), dist.get_world_size(), loss_fn=mse_loss, partition_method="uniform"
            )
            count = training.num_microbatches
            size = len(training.inputs) // count
            config = {
                "train_batch_size": size * count,
                "train_micro_batch_size_per_gpu": size,
                "gradient_accumulation_steps": count,
                "steps_per_print": 10**9,
            }
            optimizer = _optimizer(module.parameters())
            self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self._pairs = list(zip(training.inputs.chunk(count), training.targets.chunk(count), strict=True))

    def step(self) -> torch.Tensor:
        return self._engine.train_batch(iter(self._pairs))


def contestants(schedules: Sequence[str]) -> dict[str, Callable[[PlainTraining], PlainPipeline]]:
    """Return name of a pipeline -> function that builds it; DeepSpeed's pipelines only if DeepSpeed is installed."""
    makers: dict[str, Callable[[PlainTraining], PlainPipeline]] = {"one process": OneProcess}
    for schedule in schedules:
        makers[f"Pipeline, {schedule}"] = partial(OwnPipeline, schedule=schedule)
        late = f"Pipeline, {schedule}, post-validation"
        makers[late] = partial(OwnPipeline, schedule=schedule, post_validation=True)
    makers["torch 1F1B"] = partial(TorchPipeline, is_v=False)
    makers["torch ZBVZeroBubble"] = partial(TorchPipeline, is_v=True)
    if importlib.util.find_spec("deepspeed") is not None:
        makers["DeepSpeed 1F1B"] = partial(DeepSpeedPipeline, module_class="PipelineModule")
        makers["DeepSpeed DualPipeV"] = partial(DeepSpeedPipeline, module_class="DualPipeVModule")
    return makers


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE)


def _take(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
