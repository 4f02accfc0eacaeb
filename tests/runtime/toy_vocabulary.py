"""A toy pipeline whose ranks each have rows of an embedding and of an output layer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import cross_entropy, embedding, linear
from toy_pipeline import BATCH, LAYERS, WIDTH, SplitLinear, Threads, ToyStage, run_stage

from megatron.zero_bubble.runtime.collectives import Collectives
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.exchange_lane import ThreadLane
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Schedule
from tests.runtime.in_memory import InMemoryCollectives, InMemoryNetwork

ROWS = 5
"""Rows of the vocabulary that each rank has."""
DTYPE = torch.float64


class VocabularyProblem:
    """The weights of stages and shards and the data of every microbatch; a run puts gradients and losses here."""

    def __init__(self, num_ranks: int, num_stages: int, num_microbatches: int) -> None:
        generator = torch.Generator().manual_seed(11)
        new = partial(torch.randn, generator=generator, dtype=DTYPE)
        self.weights = [
            [new(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_() for _ in range(LAYERS)] for _ in range(num_stages)
        ]
        self.embedding = [new(ROWS, WIDTH).requires_grad_() for _ in range(num_ranks)]
        self.output = [new(ROWS, WIDTH).requires_grad_() for _ in range(num_ranks)]
        draw = partial(torch.randint, ROWS * num_ranks, (BATCH,), generator=generator)
        self.tokens, self.labels = ([draw() for _ in range(num_microbatches)] for _ in range(2))
        self.importance = [new(BATCH).abs_() for _ in range(num_microbatches)]
        """How much each token's loss counts."""
        self.losses: dict[int, torch.Tensor] = {}

    def gradients(self) -> list[torch.Tensor | None]:
        weights = [weight for stage in self.weights for weight in stage]
        return [weight.grad for weight in (*weights, *self.embedding, *self.output)]

    def forget_gradients(self) -> None:
        for weight in (*(weight for stage in self.weights for weight in stage), *self.embedding, *self.output):
            weight.grad = None

    def run_by_autograd(self) -> None:
        """Run the microbatches one after the other in this process, on the vocabulary as a whole."""
        for microbatch, tokens in enumerate(self.tokens):
            x = embedding(tokens, torch.cat(self.embedding))
            for weights in self.weights:
                x = run_stage(linear, weights, x, is_last=False)
            loss = cross_entropy(linear(x, torch.cat(self.output)), self.labels[microbatch], reduction="none")
            loss = (loss * self.importance[microbatch]).sum()
            loss.backward()
            self.losses[microbatch] = loss.detach()


@dataclass
class ShardState:
    """What one operation of a microbatch on a shard leaves for another."""

    tokens: torch.Tensor
    labels: torch.Tensor
    embedded: torch.Tensor
    hidden: torch.Tensor
    embedded_grad: torch.Tensor
    loss_grad: torch.Tensor
    loss: torch.Tensor
    statistics: torch.Tensor
    everyones: torch.Tensor
    softmax: torch.Tensor | None = None
    hidden_grad: torch.Tensor | None = None
    label_rows: torch.Tensor | None = None
    num_gradients: int = 0

    @classmethod
    def new(cls, num_ranks: int) -> ShardState:
        numbers, rows = partial(torch.empty, BATCH, dtype=DTYPE), partial(torch.empty, BATCH, WIDTH, dtype=DTYPE)
        tokens, labels = (torch.empty(BATCH, dtype=torch.int64) for _ in range(2))
        statistics = torch.empty(num_ranks, 3, BATCH, dtype=DTYPE)
        return cls(tokens, labels, rows(), rows(), rows(), numbers(), numbers(), statistics[0].clone(), statistics)


class ShardStage(ToyStage):
    """The stages and the vocabulary shard of one rank."""

    def __init__(
        self,
        problem: VocabularyProblem,
        schedule: Schedule,
        rank: int,
        store: WeightGradStore,
        group: Collectives,
    ) -> None:
        super().__init__(problem, schedule, rank, store)
        self.rank, self.group = rank, group
        self.first, self.last = (schedule.placement.rank_of(stage) for stage in (0, schedule.num_stages - 1))
        self.trains = any(op.kind is OpKind.T for op in schedule.ops[rank])
        self.states: dict[int, ShardState] = {}
        self.outgoing: dict[Op, tuple[torch.Tensor, ...]] = {}
        """Broadcast -> the tensors of this rank, until the lane sends them."""
        self.verdicts: list[bool] = []

    def state(self, microbatch: int) -> ShardState:
        if microbatch not in self.states:
            self.states[microbatch] = ShardState.new(self.group.size)
        return self.states[microbatch]

    def forward(self, microbatch, chunk, input_tensor):
        stage, state = self.stages[chunk], self.state(microbatch)
        x = state.embedded.requires_grad_(self.trains) if stage == 0 else input_tensor
        layer = lambda x, weight: SplitLinear.apply(x, weight, self.store)  # noqa: E731
        output = run_stage(layer, self.problem.weights[stage], x, is_last=False)
        if stage == self.num_stages - 1:
            state.hidden.copy_(output.detach())
            state.labels.copy_(self.problem.labels[microbatch])
            self.outgoing[Op(OpKind.HIDDEN, microbatch)] = state.hidden, state.labels
        return output

    def backward(self, microbatch, chunk, input_tensor, output_tensor, output_grad):
        state = self.state(microbatch)
        if output_grad is None:
            output_grad = state.hidden_grad * state.loss_grad[:, None]
        torch.autograd.Variable._execution_engine.run_backward(
            (output_tensor,), (output_grad,), False, False, (), True, True
        )
        if self.stages[chunk] == 0:
            state.embedded_grad.copy_(state.embedded.grad)
            self.outgoing[Op(OpKind.EMBEDDED_GRAD, microbatch)] = (state.embedded_grad,)
            return None
        return input_tensor.grad

    def before_gradients(self, op):
        self.ran.append(op)

    def message_spec(self, op):
        return TensorSpec((BATCH, WIDTH), DTYPE, torch.device("cpu"))

    def step(self):
        return

    def validate(self):
        return self.verdicts.pop(0) if self.verdicts else False

    def restart(self):
        self.states.clear()

    def kept_bytes(self, microbatch: int) -> int:
        state = self.states.get(microbatch)
        kept = () if state is None else (state.softmax, state.label_rows)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @torch.no_grad()
    def run_on_shard(self, op):
        state = self.state(op.microbatch)
        {OpKind.E: self.embed, OpKind.S: self.softmax, OpKind.L: self.loss, OpKind.T: self.output_grad}.get(
            op.kind, self.embedding_grad
        )(op.microbatch, state)
        if op.kind in (OpKind.T, OpKind.EW):
            state.num_gradients += 1
            if state.num_gradients == 2:
                del self.states[op.microbatch]

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tell which ids are rows of this rank, and which of its rows they are."""
        is_own = ids // ROWS == self.rank
        return is_own, torch.where(is_own, ids - self.rank * ROWS, 0)

    def embed(self, microbatch, state):
        if self.rank == self.first:
            state.tokens.copy_(self.problem.tokens[microbatch])
            self.outgoing[Op(OpKind.TOKENS, microbatch)] = (state.tokens,)
        is_own, rows = self.own(state.tokens)
        state.embedded = self.problem.embedding[self.rank].detach()[rows] * is_own[:, None]

    def softmax(self, microbatch, state):
        weight = self.problem.output[self.rank].detach()
        logits = linear(state.hidden, weight)
        maximum = logits.amax(1)
        exponentials = (logits - maximum[:, None]).exp()
        sums = exponentials.sum(1)
        is_own, rows = self.own(state.labels)
        state.statistics[0], state.statistics[1] = maximum, sums
        state.statistics[2] = logits.gather(1, rows[:, None])[:, 0] * is_own
        if self.trains:
            state.softmax = exponentials / sums[:, None]
            state.hidden_grad = state.softmax @ weight
            state.label_rows = weight[rows] * is_own[:, None]

    def loss(self, microbatch, state):
        with torch.enable_grad():
            each = state.loss.clone().requires_grad_()
            loss = (each * self.problem.importance[microbatch]).sum()
        self.problem.losses[microbatch] = loss.detach()
        if self.trains:
            (gradient,) = torch.autograd.grad(loss, each)
            state.loss_grad.copy_(gradient)
            self.outgoing[Op(OpKind.LOSS_GRAD, microbatch)] = (state.loss_grad,)

    def output_grad(self, microbatch, state):
        is_own, rows = self.own(state.labels)
        gradient = state.softmax * state.loss_grad[:, None]
        gradient[torch.arange(BATCH), rows] -= state.loss_grad * is_own
        add(self.problem.output[self.rank], gradient.t() @ state.hidden)
        state.softmax = state.label_rows = None

    def embedding_grad(self, microbatch, state):
        is_own, rows = self.own(state.tokens)
        gradient = torch.zeros(ROWS, WIDTH, dtype=DTYPE)
        gradient.index_add_(0, rows, state.embedded_grad * is_own[:, None])
        add(self.problem.embedding[self.rank], gradient)

    def exchange(self, op):
        if op in self.outgoing:
            self.broadcast(self.outgoing.pop(op), self.rank)
            return
        state = self.state(op.microbatch)
        match op.kind:
            case OpKind.TOKENS:
                self.broadcast((state.tokens,), self.first)
            case OpKind.EMBEDDED:
                self.group.sum_to(state.embedded, self.first)
            case OpKind.HIDDEN:
                self.broadcast((state.hidden, state.labels), self.last)
            case OpKind.SOFTMAX:
                self.combine(state)
            case OpKind.LOSS_GRAD:
                self.broadcast((state.loss_grad,), self.last)
            case OpKind.EMBEDDED_GRAD:
                self.broadcast((state.embedded_grad,), self.first)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        for tensor in tensors:
            self.group.broadcast(tensor, root)

    def combine(self, state: ShardState) -> None:
        self.group.gather_all(state.statistics, state.everyones)
        maxima, sums, label_logits = state.everyones.unbind(1)
        maximum = maxima.amax(0)
        shares = sums * (maxima - maximum).exp()
        total = shares.sum(0)
        state.loss.copy_(total.log() + maximum - label_logits.sum(0))
        if self.trains:
            share = (shares[self.rank] / total)[:, None]
            state.softmax.mul_(share)
            state.hidden_grad.mul_(share).sub_(state.label_rows)
            self.group.sum_to(state.hidden_grad, self.last)


def add(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


class ShardPipeline:
    """All ranks of a lowered schedule with operations on vocabulary shards, one thread each."""

    def __init__(self, schedule: Schedule, timeout: float = 20.0) -> None:
        num_ranks = schedule.num_ranks
        self.problem = VocabularyProblem(num_ranks, schedule.num_stages, schedule.num_microbatches)
        self.messages, self.shards = Threads(num_ranks, timeout), InMemoryNetwork(num_ranks, timeout)
        self.groups = [InMemoryCollectives(self.shards, rank, num_ranks) for rank in range(num_ranks)]
        self.stages: list[ShardStage] = []
        self.executors: list[Executor] = []
        self.lanes: list[ThreadLane] = []
        self.stores: list[WeightGradStore] = []
        for rank, group in enumerate(self.groups):
            store = WeightGradStore(schedule.num_chunks)
            self.stores.append(store)
            self.lanes.append(ThreadLane(group.close))
            self.stages.append(ShardStage(self.problem, schedule, rank, store, group))
            communicator = self.messages.communicator(rank)
            self.executors.append(Executor(schedule, rank, communicator, store, exchange_lane=self.lanes[-1]))

    def run(self, recorders: Sequence = ()) -> None:
        """Run one step on all ranks."""
        given = recorders or [None] * len(self.stages)
        runs = zip(self.executors, self.stages, given, strict=True)
        self.messages.run([partial(executor.run, stage, recorder) for executor, stage, recorder in runs])

    def run_ranks(self) -> list[BaseException | None]:
        """Run one step on all ranks; return the error of each. A rank that fails leaves its channels, as by exiting."""

        def run(rank: int) -> BaseException | None:
            try:
                self.executors[rank].run(self.stages[rank])
            except Exception as error:
                self.messages.close(ConnectionError(f"rank {rank} has ended"))
                return error
            return None

        with ThreadPoolExecutor(len(self.stages)) as pool:
            return list(pool.map(run, range(len(self.stages))))

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
