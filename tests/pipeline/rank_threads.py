"""Runs the ranks of a `Pipeline` as threads of one process."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import Any

import pytest
import torch

from megatron.zero_bubble import Pipeline, PipelineOptions
from tests.runtime.in_memory import InMemoryCollectives, InMemoryNetwork


@dataclass
class Threads:
    """The connections among all ranks."""

    size: int
    timeout: float = 20.0
    networks: dict[Any, InMemoryNetwork] = field(default_factory=dict)
    lock: Any = field(default_factory=Lock)

    def network(self, key: Any, size: int) -> InMemoryNetwork:
        with self.lock:
            return self.networks.setdefault(key, InMemoryNetwork(size, self.timeout))


class ThreadInterconnect:
    """One thread's connections."""

    device = torch.device("cpu")

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank
        self._opened: dict[Any, int] = defaultdict(int)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._threads.size

    def communicator(self, placement, device=None):
        self._opened["channels"] += 1
        return self._threads.network(("channels", self._opened["channels"]), self.size).communicator(self._rank)

    def collectives(self, members, device):
        members = tuple(members)
        self._opened[members] += 1
        network = self._threads.network((members, self._opened[members]), len(members))
        return InMemoryCollectives(network, members.index(self._rank), len(members))

    def of_one_pipeline(self):
        return self

    def close(self) -> None:
        return


def on_ranks(size: int, function: Callable[[ThreadInterconnect], Any], timeout: float = 20.0) -> list[Any]:
    """Call `function` with each rank's connections, in a thread a rank; return the results or raise the first error."""
    threads = Threads(size, timeout)
    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(function, ThreadInterconnect(threads, rank)) for rank in range(size)]
        return [done.result() for done in started]


def errors_on_ranks(size: int, function: Callable[[ThreadInterconnect], Any]) -> list[BaseException | None]:
    """Return the error of every rank, None where there is none."""
    threads = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(function, ThreadInterconnect(threads, rank)) for rank in range(size)]
        return [done.exception() for done in started]


def pipelines(
    size: int, layers: Sequence[Any], loss_fn: Any, use: Callable[[Pipeline], Any], **arguments: Any
) -> list[Any]:
    """Make a pipeline of copies of `layers` and return what `use` returns on each rank."""
    return on_ranks(size, lambda interconnect: use(pipeline_of(layers, loss_fn, interconnect, **arguments)))


def pipeline_of(layers: Sequence[Any], loss_fn: Any, interconnect: Any, **arguments: Any) -> Pipeline:
    """Make one rank's pipeline of a copy of `layers`; options are given by their names, beside other arguments."""
    options = {field.name: arguments.pop(field.name) for field in fields(PipelineOptions) if field.name in arguments}
    own = copy.deepcopy(list(layers))
    return Pipeline(own, loss_fn, options=PipelineOptions(**options), interconnect=interconnect, **arguments)


def gradients_of(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in pipeline.named_parameters()}


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge what the ranks have of the same names."""
    return {name: value for part in parts for name, value in part.items()}


def run_in_one_process(
    layers: Sequence[Any], loss_fn: Any, batch: tuple[Any, Any], num_microbatches: int
) -> tuple[torch.nn.Module, torch.Tensor]:
    """Accumulate the gradients of a batch under autograd; return the model and the mean loss."""
    model = torch.nn.Sequential(*copy.deepcopy(list(layers)))
    return model, accumulate(model, loss_fn, batch, num_microbatches)


def accumulate(model: Any, loss_fn: Any, batch: tuple[Any, Any], num_microbatches: int) -> torch.Tensor:
    return accumulate_pairs(model, loss_fn, list(zip(*(part.chunk(num_microbatches) for part in batch), strict=True)))


def accumulate_pairs(model: Any, loss_fn: Any, pairs: Sequence[tuple[Any, Any]]) -> torch.Tensor:
    """Add up the gradients of microbatches, without gradients only their losses; return the mean loss."""
    losses = []
    for x, y in pairs:
        loss = loss_fn(model(x), y) / len(pairs)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], start=losses[0])


def error_of(layer: torch.nn.Module, shape: tuple[int, ...]) -> str:
    """Return torch's error for a layer that cannot take an input of this shape; its text differs by version."""
    with pytest.raises(RuntimeError) as error:
        layer(torch.ones(shape))
    return f"RuntimeError: {error.value}"
