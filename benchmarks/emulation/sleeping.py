"""Emulates F, R, B and W by sleeping for their durations; Python objects represent the activations and their memory.

A tensor that passes between stages begins with two times: when the tensor was sent, and when the receiver may use it.
With these times, a message can take longer than a real message on the machine (`time_comm`), and exposed communication
can be measured. `time.perf_counter` gives the same time in all processes of a machine.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.emulation.counted_memory import EmulatedMemory, Held
from benchmarks.emulation.saved_activations import SavedActivation
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.recomputation_store import ForwardMode, RecomputationStore
from megatron.zero_bubble.runtime.stage import PairingStage, SteppingStage, VocabularyStage
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, Placement, Schedule, StageCosts

_PR_SET_TIMERSLACK = 29
_WAKING_UP = 60e-6
"""Seconds by which a sleep is shortened: the shortest observed time to wake up."""
_LEAD = 0.01
"""Seconds from the ranks' agreement on the start time of a step to this start time."""
_Header = ctypes.c_double * 2
"""First elements of a message: the time at which the message was sent, and the time from which the receiver may use
it."""


def sleep_precisely() -> None:
    """Make sleeps of this thread end on time; by default, Linux may lengthen each sleep by 50 microseconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def sleep_until(deadline: float) -> None:
    """Return at `deadline` (a time of `time.perf_counter`), never earlier and seldom later.

    The last sleep is shortened by the time to wake up, and a busy loop waits for the rest.
    """
    while (remaining := deadline - time.perf_counter()) > 0:
        if remaining > _WAKING_UP:
            time.sleep(remaining - _WAKING_UP)


def start_together() -> float:
    """Wait until the common start time, which rank 0 sets when all ranks are ready; return this time."""
    dist.barrier()
    start = torch.tensor([time.perf_counter() + _LEAD], dtype=torch.float64)
    dist.broadcast(start, src=0)
    sleep_until(start.item())
    return start.item()


class Emulation:
    """Emulates the compute of one rank by sleeps, and records the start of the first and the end of the last operation.

    Args:
        activation_bytes: size of the tensors between stages.
    """

    def __init__(self, activation_bytes: int) -> None:
        self.spec = TensorSpec((1, max(len(_Header()), activation_bytes // 8)), torch.float64, torch.device("cpu"))
        self.memory = EmulatedMemory()
        self.reset()

    def reset(self) -> None:
        """Delete the recorded times and the peak memory of the last step."""
        self.memory.reset()
        self.first_start = float("inf")
        self.last_end = 0.0

    def compute(self, milliseconds: float, *travels: float) -> list[torch.Tensor]:
        """Emulate an operation that takes `milliseconds`.

        Args:
            travels: for each message that the operation sends, the shortest time of the message in milliseconds.

        Returns:
            The messages.
        """
        start = time.perf_counter()
        self.first_start = min(self.first_start, start)
        messages = [self.spec.empty() for _ in travels]
        # Before the sleep and without torch: unlike computation in training, a sleep drops torch's code from the caches
        headers = [_header_of(message) for message in messages]
        sleep_until(start + milliseconds / 1e3)
        self.last_end = time.perf_counter()
        for header, travel in zip(headers, travels, strict=True):
            header[0], header[1] = self.last_end, self.last_end + travel / 1e3
        return messages


def _header_of(message: torch.Tensor) -> ctypes.Array[ctypes.c_double]:
    return _Header.from_address(message.data_ptr())


def await_arrival(message: torch.Tensor) -> float:
    """Wait until the receiver may use the message; return the time at which the message was sent."""
    sent, usable = _header_of(message)
    sleep_until(usable)
    return sent


class StageTimes:
    """Milliseconds of the operations and messages of one stage, and the memory of its activations."""

    def __init__(self, costs: StageCosts, placement: Placement, stage: int) -> None:
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == placement.num_stages - 1
        self.time_f, self.time_b, self.time_w = costs.time_f[stage], costs.time_b[stage], costs.time_w[stage]
        self.time_r = costs.time_r[stage]
        self.exchanged_f, self.exchanged_b = costs.all_to_all_f[stage], costs.all_to_all_b[stage]
        self.kept, self.restored, self.for_w = costs.memory_f[stage], costs.memory_r[stage], -costs.memory_w[stage]
        """Memory that F keeps if F drops nothing, memory that R restores, and memory that W needs."""
        self.offloaded = costs.memory_d[stage]
        """Part of the memory of F that can be copied to the host."""
        self.of_output = () if self.is_last else (_message_time(costs, placement, stage),)
        """Milliseconds of the message with the output; empty for the last stage."""
        self.of_gradient = () if self.is_first else (_message_time(costs, placement, stage - 1),)
        """Milliseconds of the message with the gradient of the input; empty for the first stage."""


def _message_time(costs: StageCosts, placement: Placement, edge: int) -> float:
    return costs.time_comm[edge] if placement.rank_of(edge) != placement.rank_of(edge + 1) else 0.0


_LAYERS = 4
"""Number of layers of every stage; a pair runs layers of its forward and of its backward in turn."""


def time_of_pair(forward: StageTimes, backward: StageTimes, time_w: float) -> float:
    """Milliseconds of a forward and a backward that run as a pair, on a rank with one compute stream and one link.

    The pair follows megatron-core's order, layer by layer. A part of an operation starts when the compute stream or the
    link is free, and when the previous part of the same operation is done. In each layer, the computation before and
    the computation after the exchange of tokens between experts take the same time.

    Args:
        time_w: milliseconds of W if the backward also computes weight gradients, else 0.
    """
    computed_f = (forward.time_f - forward.exchanged_f) / (2 * _LAYERS)
    computed_b = (backward.time_b + time_w - backward.exchanged_b) / (2 * _LAYERS)
    sent_f, sent_b = forward.exchanged_f / (2 * _LAYERS), backward.exchanged_b / (2 * _LAYERS)
    layer = (
        *(("link", "b", sent_b), ("rank", "f", computed_f), ("rank", "b", computed_b), ("link", "f", sent_f)),
        *(("link", "b", sent_b), ("rank", "f", computed_f), ("link", "f", sent_f), ("rank", "b", computed_b)),
    )
    free = dict.fromkeys(("link", "rank", "f", "b"), 0.0)
    for lane, operation, time_of_part in layer * _LAYERS:
        free[lane] = free[operation] = max(free[lane], free[operation]) + time_of_part
    return max(free.values())


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
        drops = self._recomputation.mode is ForwardMode.DROP
        held = self._emulation.memory.hold(times.kept - times.restored if drops else times.kept)
        self._activations[chunk, microbatch] = [held]
        if self._offloads:
            self._saved[chunk, microbatch] = SavedActivation(times.offloaded, float(microbatch))
        if drops:
            self._recomputation.put(partial(self._recompute, chunk, microbatch))

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
