"""Costs of the operations of every stage: the input of a simulation and of a planner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import add, sub
from types import MappingProxyType

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind

SMALLEST, LARGEST = 1e-50, 1e50
"""Smallest and largest cost other than zero: sums over any schedule, and ratios of costs, stay finite."""
SHARD_TIMES = ("time_e", "time_ew", "time_s", "time_t")
VOCABULARY_COSTS = (*SHARD_TIMES, "memory_s", "memory_t")
"""The fields of `StageCosts` that are costs of the operations on a rank's vocabulary shard."""
_NO_SHARDS: Mapping[str, tuple[float, ...]] = MappingProxyType(dict.fromkeys(VOCABULARY_COSTS, ()))
OPTIONAL = ("time_r", "memory_r", *VOCABULARY_COSTS)
"""The fields of `StageCosts` that are zeros unless given: most models recompute nothing, and shard no vocabulary."""


@dataclass(frozen=True)
class StageCosts:
    """Time and memory of the operations of every stage, in model order.

    Times may have any unit (milliseconds, by habit), memory too (M_B by habit: what one microbatch
    holds between F and B on a whole rank). `time_comm[s]` is the time of one message between stage `s` and
    `s + 1`, the same in both directions. Memory is a change: F allocates at its start, B and W
    release at their end, so `memory_b` and `memory_w` are negative or zero as a rule. BW costs B and
    W together.

    `memory_f` is what F holds if it keeps everything. Where a schedule has an R for a microbatch, its F holds
    `memory_r` less, and R allocates that; R takes `time_r`. Both are zeros by default: nothing can be recomputed.

    The operations E, EW, S and T on the vocabulary shard of a rank take `time_e`, `time_ew`, `time_s` and `time_t` of
    the rank's first chunk; those of its other chunks are zeros. S allocates `memory_s`, and T changes it by `memory_t`.
    """

    time_f: tuple[float, ...]
    time_b: tuple[float, ...]
    time_w: tuple[float, ...]
    time_comm: tuple[float, ...]
    """It has one entry for each edge between stages, `num_stages - 1` of them."""
    memory_f: tuple[float, ...]
    memory_b: tuple[float, ...]
    memory_w: tuple[float, ...]
    time_r: tuple[float, ...] = ()
    memory_r: tuple[float, ...] = ()
    time_e: tuple[float, ...] = ()
    time_ew: tuple[float, ...] = ()
    time_s: tuple[float, ...] = ()
    time_t: tuple[float, ...] = ()
    memory_s: tuple[float, ...] = ()
    memory_t: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        num_stages = len(self.time_f)
        if num_stages == 0:
            raise ScheduleError("costs need at least one stage")
        for field in fields(self):
            values = tuple(getattr(self, field.name))
            if not values and field.name in OPTIONAL:
                values = (0,) * num_stages
            object.__setattr__(self, field.name, values)
            expected = num_stages - 1 if field.name == "time_comm" else num_stages
            if len(values) != expected:
                raise ScheduleError(f"{field.name} has {len(values)} entries, but {num_stages} stages need {expected}")
            for value in values:
                self._check(field.name, value)

    @staticmethod
    def _check(name: str, value: float) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise ScheduleError(f"{name} must be finite numbers, got {value}")
        if name in ("time_comm", *OPTIONAL) and name != "memory_t" and value < 0:
            raise ScheduleError(f"{name} must not be negative, got {value}")
        if name in ("time_f", "time_b", "time_w") and value <= 0:
            raise ScheduleError(f"{name} must be above zero, got {value}")
        if value and not SMALLEST <= abs(value) <= LARGEST:
            raise ScheduleError(f"{name} must be numbers from {SMALLEST:g} to {LARGEST:g}, got {value}")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        time_f: float = 1,
        time_b: float = 1,
        time_w: float = 1,
        time_comm: float = 0,
        memory_f: float = 1,
        memory_b: float = -0.5,
        memory_w: float = -0.5,
        time_r: float = 0,
        memory_r: float = 0,
    ) -> StageCosts:
        """The same costs on every stage."""

        def repeat(value: float) -> tuple[float, ...]:
            return (value,) * num_stages

        return cls(
            time_f=repeat(time_f),
            time_b=repeat(time_b),
            time_w=repeat(time_w),
            time_comm=(time_comm,) * (num_stages - 1),
            memory_f=repeat(memory_f),
            memory_b=repeat(memory_b),
            memory_w=repeat(memory_w),
            time_r=repeat(time_r),
            memory_r=repeat(memory_r),
        )

    @property
    def num_stages(self) -> int:
        return len(self.time_f)

    def times(self) -> Mapping[OpKind, Sequence[float]]:
        """Per operation that is not communication, its time on every stage.

        STEP and VALIDATE cost nothing: the optimizer's work is outside of a schedule's times, with
        post-validation and without.
        """
        return {kind: self._sum(facts.time) for kind, facts in KINDS.items() if facts.message is None}

    def memory(self) -> Mapping[OpKind, Sequence[float]]:
        """Per operation that is not communication, its change of memory on every stage."""
        return {kind: self._sum(facts.memory) for kind, facts in KINDS.items() if facts.message is None}

    def work(self, stage: int) -> float:
        """Time of F, B and W of one microbatch on `stage`, and of the vocabulary shard that its rank counts with it."""
        work = self.time_f[stage] + self.time_b[stage] + self.time_w[stage]
        return work + sum(getattr(self, name)[stage] for name in SHARD_TIMES)

    def messages(self, placement: Placement) -> tuple[float, ...]:
        """Edge -> time of a message between stage s and s + 1; none is sent where both are on one rank."""
        ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        return tuple(
            0 if here == there else time for time, (here, there) in zip(self.time_comm, pairwise(ranks), strict=True)
        )

    def recomputing_in_backward(self) -> StageCosts:
        """The costs of a schedule without R whose every backward recomputes what its F did not keep."""
        return replace(
            self,
            time_b=tuple(map(add, self.time_b, self.time_r)),
            memory_f=tuple(map(sub, self.memory_f, self.memory_r)),
            memory_b=tuple(map(add, self.memory_b, self.memory_r)),
            time_r=(),
            memory_r=(),
        )

    @property
    def has_vocabulary(self) -> bool:
        """Whether every rank has a vocabulary shard, whose operations take time of their own."""
        return any(self.time_s)

    def with_shards(self, placement: Placement, shard: Mapping[str, float]) -> StageCosts:
        """The same costs with those of `VOCABULARY_COSTS` for the vocabulary shard of every rank, alike on all."""
        others = (0,) * (placement.num_stages - placement.num_ranks)
        return replace(
            self, **{name: (shard.get(name, 0),) * placement.num_ranks + others for name in VOCABULARY_COSTS}
        )

    def with_whole_vocabulary(self) -> StageCosts:
        """The costs of the same stages without shards: the first has the embedding, and the last the output layer.

        Half of the time of all S is the output layer's forward, and half its B, whose product is as large.
        """
        total = {name: sum(getattr(self, name)) for name in VOCABULARY_COSTS}
        first = {"time_f": total["time_e"], "time_w": total["time_ew"]}
        last = {"time_f": total["time_s"] / 2, "time_b": total["time_s"] / 2, "time_w": total["time_t"]}
        last |= {"memory_f": total["memory_s"], "memory_w": total["memory_t"]}
        stages = {name: list(getattr(self, name)) for name in (*first, *last)}
        for position, costs in ((0, first), (-1, last)):
            for name, cost in costs.items():
                stages[name][position] += cost
        return replace(self, **{name: tuple(values) for name, values in stages.items()}, **_NO_SHARDS)

    def with_vocabulary_in_weight_gradients(self) -> StageCosts:
        """The costs of a schedule without operations on vocabulary shards, whose every W takes their time as well."""
        work = zip(self.time_w, *(getattr(self, name) for name in SHARD_TIMES), strict=True)
        return replace(self, time_w=tuple(map(sum, work)), **_NO_SHARDS)

    def keeping_everything(self) -> StageCosts:
        """The costs of a schedule without R: every F keeps what its backward needs."""
        return replace(self, time_r=(), memory_r=())

    def split_ranks(self, placement: Placement) -> StageCosts:
        """The costs of the stages of `placement`, where these costs are of whole ranks: equal parts for the chunks.

        A message takes as long between chunks as between ranks. Where an interleaved placement goes from the last
        rank back to the first, no entry says how long that takes: the longest is taken.
        """
        if placement.num_chunks == 1:
            return self
        ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        per_stage = {
            field.name: tuple(getattr(self, field.name)[rank] / placement.num_chunks for rank in ranks)
            for field in fields(self)
            if field.name != "time_comm"
        }
        for name in VOCABULARY_COSTS:
            per_rank = getattr(self, name)[: placement.num_ranks]
            per_stage[name] = (*per_rank, *[0] * (placement.num_stages - placement.num_ranks))
        comm = []
        for here, there in pairwise(ranks):
            is_edge = abs(here - there) == 1
            comm.append(self.time_comm[min(here, there)] if is_edge else max(self.time_comm, default=0))
        return replace(self, **per_stage, time_comm=tuple(comm))

    def whole_ranks(self, placement: Placement) -> StageCosts:
        """The costs of the model cut into one stage a rank, each as long as the chunks that the rank has here."""
        per_rank = {
            field.name: placement.sums(getattr(self, field.name)) for field in fields(self) if field.name != "time_comm"
        }
        return replace(self, **per_rank, time_comm=self.time_comm[: placement.num_ranks - 1])

    def _sum(self, names: Sequence[str]) -> tuple[float, ...]:
        """The sum of these fields for every stage; zeros if there are none."""
        columns = [getattr(self, name) for name in names]
        return tuple(map(sum, zip(*columns, strict=True))) if columns else (0,) * self.num_stages


def by_result(measured: Mapping[OpKind, float]) -> dict[OpKind, float]:
    """Convert values measured by kind of operation to values of F, B and W.

    A fused backward counts half as B and half as W, because its parts were not measured.
    """
    values = {kind: value for kind, value in measured.items() if KINDS[kind].makes == (kind,)}
    for kind, value in measured.items():
        for result in KINDS[kind].makes:
            values.setdefault(result, value / len(KINDS[kind].makes))
    return values
