"""Emulates the chunks of a rank for the executor; Python objects represent the activations and their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.emulation.counted_memory import Held
from benchmarks.emulation.saved_activations import SavedActivation
from benchmarks.emulation.sleeping import Emulation
from benchmarks.emulation.stage_times import StageTimes, time_of_pair
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.recomputation_store import ForwardMode, RecomputationStore
from megatron.zero_bubble.runtime.stage import PairingStage, SteppingStage, VocabularyStage
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, Schedule, StageCosts


class Shard(Protocol):
    """The emulated vocabulary shard of one rank."""

    def run(self, op: Op) -> None: ...

    def exchange(self, op: Op) -> None: ...


class EmulatedStage(SteppingStage, VocabularyStage, PairingStage):
    """A stage that the executor runs, with emulated compute of one rank's chunks.

    Args:
        costs: costs of every microbatch, or a sequence with the costs of each microbatch.
        recomputation: store for the recomputation of activations that F drops.
        num_parameters: number of parameters; W takes the same time for each parameter.
        reduce: function that is called when the gradient of a parameter is complete.
        shard: the rank's vocabulary shard, if it has one.
    """

    def __init__(
        self,
        emulation: Emulation,
        costs: StageCosts | Sequence[StageCosts],
        schedule: Schedule,
        rank: int,
        store: WeightGradStore,
        recomputation: RecomputationStore,
        num_parameters: int = 1,
        reduce: Callable[[], None] | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._shard = shard
        self._emulation, self._store, self._recomputation = emulation, store, recomputation
        self._activations: dict[tuple[int, int], list[Held]] = {}
        self._num_parameters, self._reduce = num_parameters, reduce
        self._saved: dict[tuple[int, int], SavedActivation] = {}
        self._offloads = schedule.offloads
        self._last_microbatch = schedule.num_microbatches - 1
        placement = schedule.placement
        stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
        each = (costs,) * schedule.num_microbatches if isinstance(costs, StageCosts) else costs
        self._times = [[StageTimes(of_one, placement, stage) for of_one in each] for stage in stages]
        """By chunk and microbatch."""
        self._loss = torch.zeros(1)
        self._state: dist.Work | None = None

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        self._keep_activations(microbatch, chunk)
        times = self._times[chunk][microbatch]
        return (*self._emulation.compute(times.time_f, *times.of_output), self._loss)[0]

    def _keep_activations(self, microbatch: int, chunk: int) -> None:
        """Allocate the memory of the activations that a forward keeps."""
        times = self._times[chunk][microbatch]
        blocks = self._recomputation.current
        drops = blocks is not None and blocks.mode is ForwardMode.DROP
        held = self._emulation.memory.hold(times.kept - times.restored if drops else times.kept)
        self._activations[chunk, microbatch] = [held]
        if self._offloads:
            self._saved[chunk, microbatch] = SavedActivation(times.offloaded, float(microbatch))
        if blocks is not None and drops:
            blocks.put(partial(self._recompute, chunk, microbatch))

    def _recompute(self, chunk: int, microbatch: int) -> None:
        """Emulate R of a microbatch."""
        times = self._times[chunk][microbatch]
        self._activations[chunk, microbatch].append(self._emulation.memory.hold(times.restored))
        self._emulation.compute(times.time_r)

    def backward(
        self,
        microbatch: int,
        chunk: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        times = self._times[chunk][microbatch]
        if not self._store.is_deferring:
            for _ in range(self._num_parameters):
                self._weight_grad(times.time_w / self._num_parameters, microbatch)
        self._begin_backward(microbatch, chunk)
        messages = self._emulation.compute(times.time_b, *times.of_gradient)
        self._end_backward(microbatch, chunk)
        return messages[0] if messages else None

    def forward_backward(
        self,
        forward: Op,
        input_tensor: torch.Tensor | None,
        backward: Op,
        backward_input: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        of_forward = self._times[forward.chunk][forward.microbatch]
        of_backward = self._times[backward.chunk][backward.microbatch]
        time_w = 0.0 if self._store.is_deferring else of_backward.time_w
        self._keep_activations(forward.microbatch, forward.chunk)
        self._begin_backward(backward.microbatch, backward.chunk)
        time_of_both = time_of_pair(of_forward, of_backward, time_w)
        messages = self._emulation.compute(time_of_both, *of_forward.of_output, *of_backward.of_gradient)
        output = self._loss if of_forward.is_last else messages.pop(0)
        if not self._store.is_deferring:
            for _ in range(self._num_parameters):
                self._weight_grad(0.0, backward.microbatch)
        self._end_backward(backward.microbatch, backward.chunk)
        return output, messages[0] if messages else None

    def _begin_backward(self, microbatch: int, chunk: int) -> None:
        """Allocate the memory that W needs in addition to the activations."""
        activations = self._activations[chunk, microbatch]
        if self._store.is_deferring:
            missing = self._times[chunk][microbatch].for_w - sum(held.amount for held in activations)
            activations.append(self._emulation.memory.hold(max(0.0, missing)))

    def _end_backward(self, microbatch: int, chunk: int) -> None:
        """Release the activations, except the memory that W needs."""
        times, memory = self._times[chunk][microbatch], self._emulation.memory
        activations = self._activations.pop((chunk, microbatch))
        if self._offloads:
            self._saved.pop((chunk, microbatch)).check()
        activations.clear()
        if self._store.is_deferring:
            for parameter in range(self._num_parameters):
                held = memory.hold(times.for_w / self._num_parameters)
                weight_grad = partial(self._weight_grad, times.time_w / self._num_parameters, microbatch, held)
                self._store.put(weight_grad, parameter=parameter)

    def _weight_grad(self, milliseconds: float, microbatch: int, held: Held | None = None) -> None:
        """Emulate W of one parameter and release its memory; reduce the gradient after the last microbatch."""
        self._emulation.compute(milliseconds)
        if self._reduce is not None and microbatch == self._last_microbatch:
            self._reduce()

    def run_on_shard(self, op: Op) -> None:
        assert self._shard is not None
        self._shard.run(op)

    def exchange(self, op: Op) -> None:
        assert self._shard is not None
        self._shard.exchange(op)

    def message_spec(self, op: Op) -> TensorSpec:
        return self._emulation.spec

    def step(self) -> None:
        """Emulate the optimizer step: start an all-reduce of one number in the background, and compute nothing."""
        self._state = dist.all_reduce(torch.zeros(1), async_op=True)

    def validate(self) -> bool:
        """Wait for the all-reduce of the last optimizer step, if any.

        The result is False, because emulated optimizer steps are never amended.
        """
        if self._state is not None:
            self._state.wait()
            self._state = None
        return False

    def restart(self) -> None:
        return
