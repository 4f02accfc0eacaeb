"""Rehearses schedules before a model is built: matrix products take the place of the model's layers.

The executor, the messages between stages and the collectives of vocabulary shards are the same as in training. On a
CPU, where computation and communication share cores, a rehearsal also measures the time for which ranks wait for cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.planner.run_schedules import prepare
from megatron.zero_bubble.runtime.channel_memory import ChannelCommunicator, open_channels
from megatron.zero_bubble.runtime.collectives import Collectives, TorchCollectives
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.exchange_lane import ThreadLane
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.recomputation_store import ForwardMode, RecomputationStore
from megatron.zero_bubble.runtime.stage import VocabularyStage
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Schedule, StageCosts
from megatron.zero_bubble.schedule.lower_collectives import joined_early

_SIZE = 128
"""Rows and columns of the matrices whose products take the place of a model: one product takes about 0.1 ms."""
_BLOCKS, _PRODUCTS = 25, 100
"""Number of timed blocks of products in the calibration, and number of products in a block."""
_INTERLOCKED_STEPS = 3
"""Number of consecutive steps in one measurement if ranks begin a step without waiting for each other; otherwise a
measurement is a single step."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 8
"""Smallest and largest number of measurements of each schedule; the schedules are measured in turn."""


@dataclass(frozen=True)
class Contender:
    """A schedule to rehearse.

    Attributes:
        schedule: a schedule without communication, without copies to the host, and without pairs of F and B.
        costs: durations of the operations, in milliseconds, without delays by communication. The delays come from the
            real messages that a rehearsal sends.
        interlocks: whether ranks begin a step without waiting for each other, as with post-validation.
    """

    schedule: Schedule
    costs: StageCosts
    interlocks: bool = False


class Work:
    """Occupies a core with matrix products.

    Args:
        milliseconds: time of one product.
    """

    def __init__(self, milliseconds: float = 1.0) -> None:
        self.milliseconds = milliseconds
        self._matrix, self._product = torch.zeros(2, _SIZE, _SIZE)
        self._remainder = 0.0

    def run(self, milliseconds: float) -> None:
        """Compute matrix products for the given time.

        If the remaining time is too short for a product, the remaining time is added to the time of the next call.
        """
        self._remainder += milliseconds / self.milliseconds
        while self._remainder >= 1:
            torch.mm(self._matrix, self._matrix, out=self._product)
            self._remainder -= 1


def _calibrated_work() -> Work:
    """Measure the time of one product while all ranks compute; a collective call of the whole job."""
    work, blocks = Work(), []
    for _ in range(_BLOCKS):
        start = time.perf_counter()
        work.run(_PRODUCTS)
        blocks.append((time.perf_counter() - start) * 1e3 / _PRODUCTS)
    return Work(statistics.median(from_all_ranks(statistics.median(blocks))))


def rehearse(
    contenders: Sequence[Contender],
    group: dist.ProcessGroup,
    message: TensorSpec,
    communicator: type[ChannelCommunicator],
    timeout: timedelta,
    seconds: float,
) -> list[float]:
    """Run schedules in turn and measure the time of a step of each schedule; a collective call of the whole job.

    Args:
        group: ranks of this process's pipeline.
        message: type and shape [..., hidden] of a message between stages, on a CPU.
        communicator: class of the channels between stages.
        timeout: time limit of one message or collective.
        seconds: approximate upper limit of the time of the rehearsal; every schedule is measured at least three times,
            even if that takes longer.

    Returns:
        For each element of `contenders`, the milliseconds of a step on the slowest rank, from medians over the rounds.
    """
    work = _calibrated_work()
    with ExitStack() as opened:
        runs = [_Rehearsal(contender, group, message, communicator, timeout, work, opened) for contender in contenders]
        start = time.perf_counter()
        for run in runs:
            run.step_time()
        rounds = torch.tensor(seconds / (time.perf_counter() - start))
        dist.all_reduce(rounds, op=dist.ReduceOp.MIN)
        num_rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(rounds.item()) - 1))
        times = [[run.step_time() for run in runs] for _ in range(num_rounds)]
    slowest = torch.tensor(from_all_ranks(times), dtype=torch.float64).amax(0)  # [rounds, contenders]
    # The ratios within a round change less than the times, because all contenders share the machine's load.
    ratios = (slowest / slowest.mean(1, keepdim=True)).quantile(0.5, 0)
    return (ratios * slowest.mean(1).quantile(0.5)).tolist()


class _Rehearsal:
    """One rehearsed schedule on this rank, with channels of its own; the exit stack `opened` closes the channels."""

    def __init__(
        self,
        contender: Contender,
        group: dist.ProcessGroup,
        message: TensorSpec,
        communicator: type[ChannelCommunicator],
        timeout: timedelta,
        work: Work,
        opened: ExitStack,
    ) -> None:
        schedule, costs = contender.schedule, contender.costs
        store, recomputation = WeightGradStore(schedule.num_chunks), RecomputationStore()
        channels = open_channels(communicator, group, schedule.placement, message.device, timeout, lambda memory: None)
        opened.callback(channels.close)
        traffic, lane = None, None
        prepared = prepare(schedule, costs)
        if schedule.is_vocabulary_parallel:
            collectives = TorchCollectives(dist.get_process_group_ranks(group), group.rank(), message.device, timeout)
            opened.callback(collectives.close)
            lane = ThreadLane(collectives.close)
            opened.callback(lane.close)
            traffic = ShardTraffic(collectives, schedule, message)
            prepared = joined_early(prepared)
        self._group, self._interlocks = group, contender.interlocks
        self._stage = _BusyStage(work, costs, schedule, group.rank(), message, store, recomputation, traffic)
        self._executor = Executor(prepared, group.rank(), channels, store, recomputation, exchange_lane=lane)

    def step_time(self) -> float:
        """Return the milliseconds of a step."""
        num_steps = _INTERLOCKED_STEPS if self._interlocks else 1
        dist.barrier(self._group)
        start = time.perf_counter()
        for _ in range(num_steps):
            self._executor.run(self._stage)
        return (time.perf_counter() - start) * 1e3 / num_steps


class _BusyStage(VocabularyStage):
    """A stage that keeps its rank busy for the time of each operation, and sends messages of the model's size.

    Args:
        traffic: the collectives of the rank's vocabulary shard; None without vocabulary shards.
    """

    def __init__(
        self,
        work: Work,
        costs: StageCosts,
        schedule: Schedule,
        rank: int,
        message: TensorSpec,
        store: WeightGradStore,
        recomputation: RecomputationStore,
        traffic: ShardTraffic | None,
    ) -> None:
        self._work, self._message, self._traffic = work, message, traffic
        self._store, self._recomputation = store, recomputation
        stages = schedule.placement.stages_of(rank)
        self._times = {kind: [times[stage] for stage in stages] for kind, times in costs.times().items()}
        """Kind of operation -> chunk -> milliseconds."""

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        if self._recomputation.mode is ForwardMode.DROP:
            self._recomputation.put(partial(self._run, OpKind.R, chunk))
        self._run(OpKind.F, chunk)
        return self._message.empty()

    def backward(
        self,
        microbatch: int,
        chunk: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        self._run(OpKind.B, chunk)
        weight = partial(self._run, OpKind.W, chunk)
        if self._store.is_deferring:
            self._store.put(weight)
        else:
            weight()
        return None if input_tensor is None else self._message.empty()

    def _run(self, kind: OpKind, chunk: int) -> None:
        self._work.run(self._times[kind][chunk])

    def run_on_shard(self, op: Op) -> None:
        self._run(op.kind, 0)

    def exchange(self, op: Op) -> None:
        assert self._traffic is not None, "a collective without vocabulary shards"
        self._traffic.exchange(op.kind)

    def message_spec(self, op: Op) -> TensorSpec:
        return self._message


class ShardTraffic:
    """The collectives of one rank's vocabulary shard, with zeros of the sizes that training exchanges.

    Args:
        message: type and shape [..., hidden] of a message between stages.
    """

    def __init__(self, collectives: Collectives, schedule: Schedule, message: TensorSpec) -> None:
        self._collectives = collectives
        placement = schedule.placement
        first, last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
        hidden = message.shape[-1]
        values = message.empty().zero_()
        num_tokens = values.numel() // hidden
        tokens, numbers = (torch.zeros(num_tokens, dtype=dtype) for dtype in (torch.int64, torch.float32))
        self._statistics = torch.zeros(3, num_tokens)
        self._gathered = torch.zeros(collectives.size, 3, num_tokens)
        self._terms, self._last = torch.zeros(num_tokens, hidden), last
        self._exchanges: dict[OpKind, Callable[[], Any]] = {
            OpKind.TOKENS: partial(self._broadcast, first, tokens),
            OpKind.EMBEDDED: partial(collectives.sum_to, values, first),
            OpKind.HIDDEN: partial(self._broadcast, last, values, tokens),
            OpKind.SOFTMAX: self._combine,
            OpKind.LOSS_GRAD: partial(self._broadcast, last, numbers),
            OpKind.EMBEDDED_GRAD: partial(self._broadcast, first, values),
        }

    def exchange(self, kind: OpKind) -> None:
        """Take part in the collective operation `kind` of all ranks of the pipeline."""
        self._exchanges[kind]()

    def _broadcast(self, root: int, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._collectives.broadcast(tensor, root)

    def _combine(self) -> None:
        self._collectives.gather_all(self._statistics, self._gathered)
        self._collectives.sum_to(self._terms, self._last)
