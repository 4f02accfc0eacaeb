"""Measures the processor time of the executor itself, in steps without compute and without a network."""

from __future__ import annotations

import time

import torch

from megatron.zero_bubble.runtime.communicator import Arrived, PendingReceive, PendingSend, TensorSpec
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.made_up_neighbours import Delivered
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.recorder import HostClock
from megatron.zero_bubble.runtime.stage import Stage
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, Schedule

_SPEC = TensorSpec((1,), torch.float32, torch.device("cpu"))


class _Nowhere:
    """A communicator that discards sent tensors, and whose receives are complete at once."""

    def __init__(self) -> None:
        self._sent, self._received = Delivered(), Arrived(_SPEC.empty())

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        return self._sent

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        return self._received


class _NoCompute(Stage):
    """A stage whose operations return at once; B defers the computation of one weight gradient."""

    def __init__(self, schedule: Schedule, rank: int, store: WeightGradStore) -> None:
        self._store, self._tensor = store, _SPEC.empty()
        self._is_first = [schedule.placement.stage_of(rank, chunk) == 0 for chunk in range(schedule.num_chunks)]

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        return self._tensor

    def backward(
        self,
        microbatch: int,
        chunk: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        if self._store.is_deferring:
            self._store.put(_nothing)
        return None if self._is_first[chunk] else self._tensor

    def message_spec(self, op: Op) -> TensorSpec:
        return _SPEC


def _nothing() -> None:
    return


def seconds_per_op(schedule: Schedule, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of processor time for each operation: a pair of numbers for every rank and step.

    Sends and receives count as operations. The first number of a pair is from a plain step, and the second from a step
    with the recording that training needs for the bubble rate in the log.

    Args:
        schedule: a lowered schedule.
        steps: number of pairs of numbers for each rank.
    """
    measured = []
    for rank in range(schedule.num_ranks):
        store = WeightGradStore(schedule.num_chunks)
        executor = Executor(schedule, rank, _Nowhere(), store)
        stage = _NoCompute(schedule, rank, store)
        observer = StepObserver(HostClock())
        executor.run(stage)
        for step in range(steps):
            begin = time.thread_time()
            executor.run(stage)
            middle = time.thread_time()
            executor.run(stage, observer.start(step))
            observer.stop()
            observer.flush()
            seconds = (middle - begin, time.thread_time() - middle)
            measured.append((seconds[0] / len(schedule.ops[rank]), seconds[1] / len(schedule.ops[rank])))
    return measured
