"""A pipeline of toy stages, one thread a rank: what the executor's tests run schedules on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import Protocol

import torch
from simulated_nccl import SimulatedNccl
from torch.nn.functional import linear

from megatron.zero_bubble.runtime.communicator import Communicator, TensorSpec
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.recorder import HostClock, OpRecorder
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule
from tests.runtime.in_memory import InMemoryNetwork

WIDTH, BATCH, LAYERS = 8, 3, 2
"""The width of a message, the samples of a microbatch, and the layers of a stage."""


class SplitLinear(torch.autograd.Function):
    """A linear layer that leaves its W to the store, when told to."""

    @staticmethod
    def forward(ctx, x, weight, store):
        ctx.save_for_backward(x)
        # Saved tensors that pass through hooks come back as other tensors, and the gradient is added to this one.
        ctx.weight, ctx.store = weight, store
        return linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight_grad = partial(add_weight_grad, weight, x.detach(), grad)
        if ctx.store.is_deferring:
            ctx.store.put(weight_grad, parameter=weight)
        else:
            weight_grad()
        return grad @ weight, None, None


def add_weight_grad(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
    new = grad.flatten(0, -2).t() @ x.flatten(0, -2)
    weight.grad = new if weight.grad is None else weight.grad + new


def run_stage(layer: Callable, weights: list[torch.Tensor], x: torch.Tensor, is_last: bool) -> torch.Tensor:
    """Ends with a linear layer, which does not save its output: the executor releases that."""
    for weight in weights:
        x = layer(torch.tanh(x), weight)
    return torch.tanh(x).square().sum() if is_last else x


class ToyStage:
    """The stages of one rank, and a record of what was asked of them."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int, store: WeightGradStore) -> None:
        self.problem, self.store, self.num_stages = problem, store, schedule.num_stages
        self.stages = [schedule.placement.stage_of(rank, chunk) for chunk in range(schedule.num_chunks)]
        self.ran: list[Op] = []
        self.released = 0
        self.live: list[int] = []
        self.inputs_need_gradients: set[bool] = set()
        self.outputs: dict[tuple[int, int], weakref.ref] = {}
        self.count_live: Callable[[], int] = lambda: 0

    def forward(self, microbatch, chunk, input_tensor):
        self.ran.append(Op(OpKind.F, microbatch, chunk))
        self.live.append(self.count_live() + 1)
        stage = self.stages[chunk]
        assert (input_tensor is None) == (stage == 0)
        if input_tensor is not None:
            self.inputs_need_gradients.add(input_tensor.requires_grad)
        x = self.problem.data[microbatch] if input_tensor is None else input_tensor
        is_last = stage == self.num_stages - 1
        layer = lambda x, weight: SplitLinear.apply(x, weight, self.store)  # noqa: E731
        output = run_stage(layer, self.problem.weights[stage], x, is_last)
        if is_last:
            self.problem.losses[microbatch] = output.detach().clone()
        self.outputs[chunk, microbatch] = weakref.ref(output)
        return output

    def backward(self, microbatch, chunk, input_tensor, output_tensor, output_grad):
        assert (output_grad is None) == (self.stages[chunk] == self.num_stages - 1)
        # The engine itself: a released output no longer has its gradient's shape.
        gradient = torch.ones_like(output_tensor) if output_grad is None else output_grad
        torch.autograd.Variable._execution_engine.run_backward(
            (output_tensor,), (gradient,), False, False, (), True, True
        )
        return None if input_tensor is None else input_tensor.grad

    def release_output(self, output_tensor):
        self.released += 1
        output_tensor.data = torch.empty(1)

    def before_inputs(self, op):
        return

    def before_gradients(self, op):
        self.ran.append(op)
        if op.kind is OpKind.W:
            assert self.outputs[op.chunk, op.microbatch]() is None, "B left the activation alive"

    def message_spec(self, op):
        assert op.kind in (OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD)
        return TensorSpec((BATCH, WIDTH), torch.float32, torch.device("cpu"))


class Problem:
    """The weights of every stage and the data of every microbatch; a run puts gradients and losses here."""

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        generator = torch.Generator().manual_seed(7)
        new = partial(torch.randn, generator=generator)
        self.weights = [
            [new(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_() for _ in range(LAYERS)] for _ in range(num_stages)
        ]
        self.data = [new(BATCH, WIDTH) for _ in range(num_microbatches)]
        self.losses: dict[int, torch.Tensor] = {}

    def gradients(self) -> list[torch.Tensor | None]:
        return [weight.grad for stage in self.weights for weight in stage]

    def run_by_autograd(self) -> None:
        """Run the microbatches one after the other in this process, by torch's own linear layer and autograd."""
        for microbatch, x in enumerate(self.data):
            for weights in self.weights:
                x = run_stage(linear, weights, x, weights is self.weights[-1])
            x.backward()
            self.losses[microbatch] = x.detach()


class Network(Protocol):
    """Gives the ranks of a pipeline their communicators, and runs them."""

    def communicators(self, placement: Placement) -> Sequence[Communicator]: ...

    def run(self, functions: Sequence[Callable[[], None]]) -> object:
        """Run the function of each rank in a thread of its own; an exception of one is raised again."""
        ...


class Threads(InMemoryNetwork):
    """Ranks that run at the same time, and messages that arrive at once."""

    def communicators(self, placement: Placement) -> list[Communicator]:
        return [self.communicator(rank) for rank in range(placement.num_ranks)]

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(len(functions)) as pool:
            for done in [pool.submit(function) for function in functions]:
                done.result()


class Pipeline:
    """All ranks of a lowered schedule."""

    stage_type = ToyStage

    def __init__(
        self, schedule: Schedule, problem: Problem, network: Network, *, tail_by_parameter: bool = False
    ) -> None:
        self.tail_by_parameter = tail_by_parameter
        self.schedule, self.problem, self.network = schedule, problem, network
        self.executors: list[Executor] = []
        self.stages: list[ToyStage] = []
        for rank, communicator in enumerate(network.communicators(schedule.placement)):
            self._add_rank(rank, communicator)

    def _add_rank(self, rank: int, communicator: Communicator) -> None:
        store = WeightGradStore(self.schedule.num_chunks)
        stage = self.stage_type(self.problem, self.schedule, rank, store)
        executor = Executor(self.schedule, rank, communicator, store, tail_by_parameter=self.tail_by_parameter)
        stage.count_live = lambda: num_live_activations(executor)
        self.executors.append(executor)
        self.stages.append(stage)

    def run(self, recorders: Sequence[OpRecorder | None] = ()) -> None:
        """Run one step on all ranks."""
        ranks = zip_longest(self.executors, self.stages, recorders)
        self.network.run([partial(executor.run, stage, recorder) for executor, stage, recorder in ranks])


def num_live_activations(executor: Executor) -> int:
    """Number of forwards whose activations F has kept or R has restored, and whose backward has not run."""
    return len(executor._activations) - len(executor._recomputation.dropped())


def on_threads(schedule: Schedule, timeout: float = 10.0) -> Pipeline:
    problem = Problem(schedule.num_stages, schedule.num_microbatches)
    return Pipeline(schedule, problem, Threads(schedule.num_ranks, timeout))


def over_nccl(schedule: Schedule, seed: int = 0, *, tail_by_parameter: bool = False) -> Pipeline:
    """A pipeline over a network with NCCL's rules; a step that breaks one raises `Fault`."""
    problem = Problem(schedule.num_stages, schedule.num_microbatches)
    network = SimulatedNccl(schedule.num_ranks, seed)
    return Pipeline(schedule, problem, network, tail_by_parameter=tail_by_parameter)


class FakeClock(HostClock):
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def lag(self) -> float:
        return 0.25


class FakeDevice:
    """A clock whose marks are reached when the test says so, as a GPU's are."""

    def __init__(self) -> None:
        self.reached = 0

    def mark(self) -> None:
        return None

    def seconds(self, marks):
        return [0.0 for _ in marks]

    def num_reached(self, marks):
        return self.reached
