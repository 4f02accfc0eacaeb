"""Runs one rank of one of this project's schedules, with the executor of real trainings and emulated compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from benchmarks.emulation.emulated_stage import EmulatedStage
from benchmarks.emulation.link import EmulatedLink
from benchmarks.emulation.reduction import ReductionCosts, ReductionLink
from benchmarks.emulation.saved_activations import CountedOffloadStore
from benchmarks.emulation.shard import EmulatedLane, EmulatedShard
from benchmarks.emulation.sleeping import Emulation
from megatron.zero_bubble.runtime.collectives import Collectives
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import HostClock, OpRecorder
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Schedule, StageCosts


class OwnRun:
    """Runs one rank of a schedule of this project.

    Args:
        costs: emulated costs of every microbatch; without vocabulary shards, optionally a sequence with the costs of
            each microbatch.
        reduction: costs of reducing gradients over `replicas`; None without replicas.
        waits_for_optimizer: whether a step ends with a wait for the optimizer's reduction.
        group: group of all pipeline ranks, needed only for schedules with operations on vocabulary shards.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: StageCosts | Sequence[StageCosts],
        emulation: Emulation,
        rank: int,
        communicator: Communicator,
        reduction: ReductionCosts | None,
        replicas: dist.ProcessGroup | None,
        waits_for_optimizer: bool,
        tail_by_parameter: bool,
        group: Collectives | None = None,
    ) -> None:
        self._waits_for_optimizer = waits_for_optimizer
        store, recomputation = WeightGradStore(schedule.num_chunks), RecomputationStore()
        self.link = EmulatedLink(communicator)
        self.recorder = OpRecorder(HostClock())
        shard, self._lane = None, None
        if schedule.is_vocabulary_parallel:
            assert group is not None
            assert isinstance(costs, StageCosts)
            shard = EmulatedShard(emulation, costs, schedule, rank, group)
            self._lane = EmulatedLane(shard, group.close)
        offload = None
        if schedule.offloads:
            assert isinstance(costs, StageCosts)
            offload = CountedOffloadStore(costs, schedule, rank, emulation.memory)
        self._executor = Executor(
            schedule,
            rank,
            self.link,
            store,
            recomputation,
            tail_by_parameter=tail_by_parameter,
            offload_store=offload,
            exchange_lane=self._lane,
        )
        stage = partial(EmulatedStage, emulation, costs, schedule, rank, store, recomputation, shard=shard)
        if reduction is None or replicas is None:
            self._reduction, self._stage = None, stage()
            return
        self._reduction = ReductionLink(reduction, schedule.num_chunks, replicas)
        self._stage = stage(reduction.num_buckets, self._reduction.start)

    @property
    def exposed(self) -> float:
        """Seconds that the last step waited for messages already sent, and for collectives already begun."""
        return self.link.exposed + (self._lane.exposed if self._lane is not None else 0.0)

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()

    def step(self) -> None:
        self.link.exposed = 0.0
        if self._lane is not None:
            self._lane.exposed = 0.0
        self._executor.run(self._stage, self.recorder)
        if self._reduction is not None:
            self._reduction.finish()
        if self._waits_for_optimizer:
            self._stage.step()
            self._stage.validate()
