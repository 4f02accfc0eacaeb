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
BLOCKS = ("num_blocks", "memory_outside")
"""The fields of `StageCosts` that say how a stage's recomputation can be divided."""
COPY_COSTS = ("time_d", "time_h", "memory_d")
"""The fields of `StageCosts` that are costs of copies to and from the host."""
OPTIONAL = ("time_r", "memory_r", *BLOCKS, *COPY_COSTS, "all_to_all_f", "all_to_all_b", *VOCABULARY_COSTS)
"""The fields of `StageCosts` that are zeros unless given: most models recompute and offload nothing, have no experts,
and shard no vocabulary."""


@dataclass(frozen=True)
class StageCosts:
    """Time and memory of the operations of every stage, in model order.

    Times may have any unit (milliseconds, by habit), memory too (M_B by habit: what one microbatch
    holds between F and B on a whole rank). `time_comm[s]` is the time of one message between stage `s` and
    `s + 1`, the same in both directions. Memory is a change: F allocates at its start, B and W
    release at their end, so `memory_b` and `memory_w` are negative or zero as a rule. BW costs B and
    W together.

    `memory_f` is the memory of an F that keeps all activations. Where a schedule has an R for a microbatch, its F holds
    `memory_r` less, and R allocates that; R takes `time_r`. Both are zeros by default: nothing can be recomputed.
    `num_blocks` are the blocks of layers, each with a forward of its own, into which a stage can divide its
    recomputation (see `in_groups`); 0 if that is not known. `memory_outside` is the part of what a microbatch holds
    between B and W that layers outside of these blocks hold, such as the output layer.

    Where a schedule has a D for a microbatch, its F's copy to the host occupies the rank's host link for `time_d`, D
    releases `memory_d`, and H, whose copy occupies the link for `time_h`, allocates that again.

    `all_to_all_f` and `all_to_all_b` are the parts of `time_f` and `time_b` in which a stage exchanges tokens between
    experts and computes nothing. In a pair these messages pass while the other operation computes.

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
    num_blocks: tuple[float, ...] = ()
    memory_outside: tuple[float, ...] = ()
    time_d: tuple[float, ...] = ()
    time_h: tuple[float, ...] = ()
    memory_d: tuple[float, ...] = ()
    all_to_all_f: tuple[float, ...] = ()
    all_to_all_b: tuple[float, ...] = ()
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

        for part, whole in (("all_to_all_f", "time_f"), ("all_to_all_b", "time_b")):
            for exchanged, time in zip(getattr(self, part), getattr(self, whole), strict=True):
                if exchanged > time:
                    raise ScheduleError(f"{part} must be a part of {whole}, got {exchanged} of {time}")

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
        **others: float,
    ) -> StageCosts:
        """The same costs on every stage. `others` are fields of `OPTIONAL`."""
        costs = {
            "time_f": time_f,
            "time_b": time_b,
            "time_w": time_w,
            "memory_f": memory_f,
            "memory_b": memory_b,
            "memory_w": memory_w,
            "time_r": time_r,
            "memory_r": memory_r,
            **others,
        }
        every = {name: (cost,) * num_stages for name, cost in costs.items()}
        return cls(time_comm=(time_comm,) * (num_stages - 1), **every)

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
        return {
            kind: tuple(map(sub, self._sum(facts.memory), self._sum(facts.frees)))
            if facts.frees
            else self._sum(facts.memory)
            for kind, facts in KINDS.items()
            if facts.message is None
        }

    def time_of_pair(self, forward: int, backward_kind: OpKind, backward: int) -> float:
        """Time of a pair: a forward and a backward of these stages, which exchange tokens while the other computes.

        A rank has one link and computes one operation at a time, so the pair takes the longer of its whole computation
        and its whole exchange.
        """
        exchanged = self.all_to_all_f[forward] + self.all_to_all_b[backward]
        whole = self.time_f[forward] + self.times()[backward_kind][backward]
        return max(whole - exchanged, exchanged)

    @property
    def has_all_to_all(self) -> bool:
        """Whether any stage exchanges tokens between experts."""
        return any(self.all_to_all_f) or any(self.all_to_all_b)

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
        """The costs of a schedule without R in which every backward recomputes the activations that its F dropped."""
        return replace(
            self.keeping_everything(),
            time_b=tuple(map(add, self.time_b, self.time_r)),
            memory_f=tuple(map(sub, self.memory_f, self.memory_r)),
            memory_b=tuple(map(add, self.memory_b, self.memory_r)),
        )

    def in_groups(self, groups: Sequence[int]) -> StageCosts:
        """The costs of a schedule whose stages restore their activations in `groups` groups of blocks.

        In a stage with several groups, F keeps the last group, or R restores it. B restores each other group right
        before it runs through the group. It also runs the weight gradients of all groups except the first, so that no
        more than one group is in memory at a time. D does not copy what F has dropped.

        Args:
            groups: stage -> groups; empty for one group everywhere.
        """
        if max(groups, default=1) == 1:
            return self
        names = ("time_b", "time_w", "time_r", "memory_f", "memory_b", "memory_w", "memory_r", *COPY_COSTS)
        columns = {name: list(getattr(self, name)) for name in names}
        for stage, given in enumerate(groups):
            last, first = self._parts(stage, given)
            in_b = (1 - last) * self.time_r[stage] + (1 - first) * self.time_w[stage]
            kept = self.memory_f[stage] - self.memory_r[stage]
            after_b = self.memory_f[stage] + self.memory_b[stage]
            pending = after_b - (1 - first) * max(0, after_b - self.memory_outside[stage])
            columns["time_b"][stage] += in_b
            columns["time_w"][stage] *= first
            columns["time_r"][stage] *= last
            columns["memory_r"][stage] *= last
            dropped = self.memory_r[stage] - columns["memory_r"][stage]
            self._copy(columns, stage, max(0, self.memory_d[stage] - dropped))
            columns["memory_f"][stage] = kept + columns["memory_r"][stage]
            columns["memory_b"][stage] = pending - columns["memory_f"][stage]
            columns["memory_w"][stage] = after_b + self.memory_w[stage] - pending
        return replace(self, **{name: tuple(values) for name, values in columns.items()})

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

        Half of the total time of S is the output layer's forward, and the other half its B, which multiplies as much.
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
        """The costs of a schedule without operations on vocabulary shards, in which every W also takes their time."""
        work = zip(self.time_w, *(getattr(self, name) for name in SHARD_TIMES), strict=True)
        return replace(self, time_w=tuple(map(sum, work)), **_NO_SHARDS)

    def with_memory_of_all_groups(self, groups: Sequence[int]) -> StageCosts:
        """The costs of stages that restore everything at once, where the memory is that of `groups`.

        It is the inverse of `in_groups` for memory and copies; the other times stay as they are.
        """
        if max(groups, default=1) == 1:
            return self
        names = ("memory_f", "memory_b", "memory_w", "memory_r", *COPY_COSTS)
        columns = {name: list(getattr(self, name)) for name in names}
        for stage, given in enumerate(groups):
            last, first = self._parts(stage, given)
            restored = self.memory_r[stage]
            if given > 1 and not restored:  # without R, F keeps the last group for the B that follows at once
                restored = max(0, self.memory_f[stage] - self.memory_outside[stage])
            kept = self.memory_f[stage] - restored
            pending = self.memory_f[stage] + self.memory_b[stage]
            after_b = pending + max(0, pending - self.memory_outside[stage]) * (1 / first - 1)
            columns["memory_r"][stage] = restored / last
            dropped = restored / last - restored
            self._copy(columns, stage, self.memory_d[stage] and self.memory_d[stage] + dropped)
            columns["memory_f"][stage] = kept + columns["memory_r"][stage]
            columns["memory_b"][stage] = after_b - columns["memory_f"][stage]
            columns["memory_w"][stage] += pending - after_b
        return replace(self, **{name: tuple(values) for name, values in columns.items()})

    def _copy(self, columns: Mapping[str, list[float]], stage: int, size: float) -> None:
        """Let D and H of a stage copy so much, at the same rate."""
        for name in COPY_COSTS if self.memory_d[stage] else ():
            columns[name][stage] *= size / self.memory_d[stage]

    def _parts(self, stage: int, groups: int) -> tuple[float, float]:
        """The parts of a stage's blocks that are in the last and in the first of so many groups."""
        blocks = self.blocks(stage) or groups
        number = min(groups, blocks)
        return -(-blocks // number) / blocks, blocks // number / blocks

    def blocks(self, stage: int) -> int:
        """The whole blocks of a stage, of which units of a model may be parts."""
        return int(self.num_blocks[stage] + 1e-6)

    def keeping_everything(self) -> StageCosts:
        """The costs of a schedule without R: every F keeps the activations for its backward."""
        return replace(self.at_once(), time_r=(), memory_r=())

    def at_once(self) -> StageCosts:
        """The costs without the division into groups: stages restore all of their activations at once."""
        return replace(self, num_blocks=(), memory_outside=())

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
        """The sum of the given fields for every stage; zeros without fields."""
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
