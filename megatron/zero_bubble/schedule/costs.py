"""Costs of the operations of every stage: the input of the simulation and of the planner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from operator import add, sub
from types import MappingProxyType

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind

SMALLEST, LARGEST = 1e-50, 1e50
"""Smallest and largest absolute value of a nonzero cost; within these limits, sums and ratios of costs are finite."""
SHARD_TIMES = ("time_e", "time_ew", "time_s", "time_t")
VOCABULARY_COSTS = (*SHARD_TIMES, "memory_s", "memory_t", "latency_collective")
"""The fields of `StageCosts` for operations on the vocabulary shard of a rank."""
_NO_SHARDS: Mapping[str, tuple[float, ...]] = MappingProxyType(dict.fromkeys(VOCABULARY_COSTS, ()))
EXCHANGES: Mapping[str, str] = MappingProxyType({"all_to_all_f": "time_f", "all_to_all_b": "time_b"})
"""The fields of `StageCosts` for exchanges of tokens between experts -> the fields of the times that contain them."""
MESSAGE_COSTS = ("time_comm", "latency_collective")
"""The fields of `StageCosts` for messages and collectives, to which waits are added when costs are corrected."""
COPY_COSTS = ("time_d", "time_h", "memory_d")
"""The fields of `StageCosts` for copies to and from the host."""
_RECOMPUTATION = ("time_r", "memory_r", "num_blocks", "memory_outside")
OPTIONAL = ("saved_bw", *_RECOMPUTATION, *COPY_COSTS, *EXCHANGES, *VOCABULARY_COSTS)
"""The fields of `StageCosts` that are zeros by default, such as the costs of recomputation and of vocabulary shards."""


@dataclass(frozen=True)
class StageCosts:
    """Times and memory of the operations of every stage; the stages are in model order.

    All times are in the same unit, usually milliseconds. All memory is in the same unit, usually M_B, which is the
    activation memory of one microbatch on all stages of a rank. The memory cost of an operation is a change of the
    memory in use: F allocates memory at its start, and B and W release memory at their end. `memory_b` and `memory_w`
    are usually negative, because B and W usually release memory. BW takes the time of B and W together minus
    `saved_bw`.

    Recomputation: if a microbatch has an R (recomputation), its F allocates `memory_f - memory_r`, and its R allocates
    `memory_r`.

    Offload: D releases `memory_d` on the device after the copy to the host, and H allocates `memory_d` again before the
    copy to the device. The copies of D and H occupy the host link of the rank, that is, the link between the device and
    the host.

    With vocabulary parallelism, every rank has one vocabulary shard. In the fields for vocabulary shards, such as
    `time_s`, the entry of a rank's first stage is the cost of the rank's shard, and the entries of the rank's other
    stages are zeros.
    """

    time_f: tuple[float, ...]
    """Stage -> time of F."""
    time_b: tuple[float, ...]
    """Stage -> time of B."""
    time_w: tuple[float, ...]
    """Stage -> time of W."""
    time_comm: tuple[float, ...]
    """Stage s -> time of one message between stages s and s + 1, in either direction; `num_stages - 1` entries."""
    memory_f: tuple[float, ...]
    """Stage -> memory that F allocates if F keeps all activations."""
    memory_b: tuple[float, ...]
    """Stage -> change of memory by B."""
    memory_w: tuple[float, ...]
    """Stage -> change of memory by W."""
    saved_bw: tuple[float, ...] = ()
    """Stage -> time that one BW saves, compared with a B and a W."""
    time_r: tuple[float, ...] = ()
    """Stage -> time of R, the recomputation of the activations that F drops."""
    memory_r: tuple[float, ...] = ()
    """Stage -> memory of the activations that F drops and R restores; 0 if nothing can be recomputed."""
    num_blocks: tuple[float, ...] = ()
    """Stage -> number of blocks of layers into which recomputation can be divided (`block_groups`); 0 if unknown."""
    memory_outside: tuple[float, ...] = ()
    """Stage -> memory that layers outside of recomputable blocks, such as the output layer, hold between B and W."""
    time_d: tuple[float, ...] = ()
    """Stage -> time for which the copy of activations to the host occupies the host link."""
    time_h: tuple[float, ...] = ()
    """Stage -> time for which the copy of activations back to the device occupies the host link."""
    memory_d: tuple[float, ...] = ()
    """Stage -> memory that an offload (D) releases on the device and the reload (H) allocates again."""
    all_to_all_f: tuple[float, ...] = ()
    """Stage -> part of `time_f` in which the stage exchanges tokens between experts and does not compute."""
    all_to_all_b: tuple[float, ...] = ()
    """Stage -> part of `time_b` in which the stage exchanges tokens between experts and does not compute."""
    time_e: tuple[float, ...] = ()
    """Stage -> time of E, the embedding on the vocabulary shard of the stage's rank."""
    time_ew: tuple[float, ...] = ()
    """Stage -> time of EW, the weight gradient of the embedding on the vocabulary shard of the stage's rank."""
    time_s: tuple[float, ...] = ()
    """Stage -> time of S, the output layer on the vocabulary shard of the stage's rank."""
    time_t: tuple[float, ...] = ()
    """Stage -> time of T, the weight gradient of the output layer on the vocabulary shard of the stage's rank."""
    memory_s: tuple[float, ...] = ()
    """Stage -> memory that S (output layer on a vocabulary shard) allocates."""
    memory_t: tuple[float, ...] = ()
    """Stage -> change of memory by T (weight gradient of the output layer on a vocabulary shard)."""
    latency_collective: tuple[float, ...] = ()
    """Stage -> time of a collective for vocabulary shards; 0 stands for the time of the slowest message."""

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
            for value in dict.fromkeys(values):  # many stages have equal costs
                self._check(field.name, value)
        for part, whole in EXCHANGES.items():
            for exchanged, time in zip(getattr(self, part), getattr(self, whole), strict=True):
                if exchanged > time:
                    raise ScheduleError(f"{part} must be a part of {whole}, got {exchanged} of {time}")
        for saved, time in zip(self.saved_bw, self.time_w, strict=True):
            if saved and saved >= time:
                raise ScheduleError(f"saved_bw must be less than time_w, got {saved} and {time}")

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
        **others: float,
    ) -> StageCosts:
        """Return equal costs for all stages; `others` maps names of other fields of `StageCosts` to values."""
        times = {"time_f": time_f, "time_b": time_b, "time_w": time_w}
        memory = {"memory_f": memory_f, "memory_b": memory_b, "memory_w": memory_w}
        every = {name: (cost,) * num_stages for name, cost in {**times, **memory, **others}.items()}
        return cls(time_comm=(time_comm,) * (num_stages - 1), **every)

    @property
    def num_stages(self) -> int:
        return len(self.time_f)

    @cached_property
    def times(self) -> Mapping[OpKind, Sequence[float]]:
        """Kind of operation, except sends and receives -> time of the operation on every stage.

        The times of STEP and VALIDATE are zeros, because the time of a schedule does not include the optimizer.
        """
        return self._by_kind("time", "saves")

    @cached_property
    def memory(self) -> Mapping[OpKind, Sequence[float]]:
        """Kind of operation, except sends and receives -> change of memory on every stage."""
        return self._by_kind("memory", "frees")

    def time_of_pair(self, forward: int, backward_kind: OpKind, backward: int) -> float:
        """Return the time of a pair: a forward and a backward, of which one computes while the other exchanges tokens.

        The time of a pair is the larger of two sums: the sum of the computation times of the forward and the backward,
        and the sum of their exchange times. At any time, a rank computes at most one operation, and exchanges the
        tokens of at most one operation.

        Args:
            forward: stage of the forward in the pair.
            backward_kind: kind of the backward in the pair, `PB` or `PBW`.
            backward: stage of the backward in the pair.
        """
        exchanged = self.all_to_all_f[forward] + self.all_to_all_b[backward]
        whole = self.time_f[forward] + self.times[backward_kind][backward]
        return max(whole - exchanged, exchanged)

    @property
    def has_all_to_all(self) -> bool:
        """Whether any stage exchanges tokens between experts."""
        return any(self.all_to_all_f) or any(self.all_to_all_b)

    def work(self, stage: int) -> float:
        """Return the total time of one microbatch on `stage`: F, B, W and the operations on the vocabulary shard."""
        work = self.time_f[stage] + self.time_b[stage] + self.time_w[stage]
        return work + sum(getattr(self, name)[stage] for name in SHARD_TIMES)

    def messages(self, placement: Placement) -> tuple[float, ...]:
        """Stage s -> time of a message between stages s and s + 1; 0 if both stages are on one rank."""
        ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        return tuple(
            0 if here == there else time for time, (here, there) in zip(self.time_comm, pairwise(ranks), strict=True)
        )

    def saving_as(self, other: StageCosts) -> StageCosts:
        """Return costs in which BW saves the same fraction of B plus W as in `other`, but at most half of W."""
        stages = zip(self.time_b, self.time_w, other.time_b, other.time_w, other.saved_bw, strict=True)
        saved = ((w, (b + w) * saved / (old_b + old_w)) for b, w, old_b, old_w, saved in stages)
        return replace(self, saved_bw=tuple(min(w / 2, time) for w, time in saved))

    @property
    def with_cheapest_weight_gradients(self) -> StageCosts:
        """Costs in which W is shorter by `saved_bw`; lower bounds from these costs also hold for schedules with BW."""
        return replace(self, time_w=tuple(map(sub, self.time_w, self.saved_bw)), saved_bw=())

    def exchanges_within(self, times: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
        """The times of exchanges between experts, cut to the given times of F and B, which contain them."""
        return {part: tuple(map(min, getattr(self, part), times[whole])) for part, whole in EXCHANGES.items()}

    def recomputing_in_backward(self) -> StageCosts:
        """Return the costs of a schedule in which B recomputes the activations that F drops, without a separate R."""
        return replace(
            self.keeping_everything(),
            time_b=tuple(map(add, self.time_b, self.time_r)),
            memory_f=tuple(map(sub, self.memory_f, self.memory_r)),
            memory_b=tuple(map(add, self.memory_b, self.memory_r)),
        )

    @property
    def has_vocabulary(self) -> bool:
        """Whether the costs are for ranks with vocabulary shards, that is, whether any S (output layer) takes time."""
        return any(self.time_s)

    def with_shards(self, placement: Placement, shard: Mapping[str, float]) -> StageCosts:
        """Return a copy of the costs with a vocabulary shard on every rank.

        `shard` maps each field for vocabulary shards, such as `time_s`, to the cost of one shard.
        """
        others = (0,) * (placement.num_stages - placement.num_ranks)
        return replace(
            self, **{name: (shard.get(name, 0),) * placement.num_ranks + others for name in VOCABULARY_COSTS}
        )

    @property
    def whole_vocabulary(self) -> tuple[dict[str, float], dict[str, float]]:
        """Names and values of the costs of the whole embedding, and of the whole output layer: sums over all shards.

        S computes the forward and the input gradient of the output layer, which have the same number of
        multiplications; F and B of the output layer therefore each take half of the time of S.
        """
        total = {name: sum(getattr(self, name)) for name in VOCABULARY_COSTS}
        output = {"time_f": total["time_s"] / 2, "time_b": total["time_s"] / 2, "time_w": total["time_t"]}
        output |= {"memory_f": total["memory_s"], "memory_w": total["memory_t"]}
        return {"time_f": total["time_e"], "time_w": total["time_ew"]}, output

    def with_whole_vocabulary(self) -> StageCosts:
        """Return costs in which the first stage has the whole embedding, and the last stage the whole output layer."""
        first, last = self.whole_vocabulary
        stages = {name: list(getattr(self, name)) for name in (*first, *last)}
        for position, costs in ((0, first), (-1, last)):
            for name, cost in costs.items():
                stages[name][position] += cost
        return replace(self, **{name: tuple(values) for name, values in stages.items()}, **_NO_SHARDS)

    def with_vocabulary_in_weight_gradients(self) -> StageCosts:
        """Return costs without vocabulary shards, in which the time of the operations on the shards is added to W."""
        work = zip(self.time_w, *(getattr(self, name) for name in SHARD_TIMES), strict=True)
        return replace(self, time_w=tuple(map(sum, work)), **_NO_SHARDS)

    def blocks(self, stage: int) -> int:
        """Return the number of blocks of layers in a stage, rounded down to a whole number."""
        return int(self.num_blocks[stage] + 1e-6)

    def keeping_everything(self) -> StageCosts:
        """Return the costs of a schedule without recomputation: every F keeps all activations."""
        return replace(self.at_once(), time_r=(), memory_r=())

    def at_once(self) -> StageCosts:
        """The costs of stages that recompute all of their activations in one group of layers."""
        return replace(self, num_blocks=(), memory_outside=())

    def split_ranks(self, placement: Placement) -> StageCosts:
        """Divide the costs of whole ranks equally among the model chunks that each rank has in `placement`.

        Dividing the costs does not change the time of a message between neighbouring ranks. A message from the last
        rank to the first rank takes as long as the slowest message between neighbouring ranks.
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
        slowest = max(self.time_comm, default=0)
        comm = (self.time_comm[min(pair)] if abs(sub(*pair)) == 1 else slowest for pair in pairwise(ranks))
        return replace(self, **per_stage, time_comm=tuple(comm))

    def whole_ranks(self, placement: Placement) -> StageCosts:
        """Return the costs of whole ranks: for each rank of `placement`, the sums of the costs of the rank's stages."""
        per_rank = {
            field.name: placement.sums(getattr(self, field.name)) for field in fields(self) if field.name != "time_comm"
        }
        return replace(self, **per_rank, time_comm=self.time_comm[: placement.num_ranks - 1])

    def _by_kind(self, added: str, subtracted: str) -> Mapping[OpKind, Sequence[float]]:
        """Kind -> cost on each stage: sum of the fields in column `added` of `KINDS`, minus the sum in `subtracted`."""
        costs = {}
        for kind, facts in KINDS.items():
            if facts.message is None:
                plus, minus = ([getattr(self, name) for name in getattr(facts, field)] for field in (added, subtracted))
                total = tuple(map(sum, zip(*plus, strict=True))) if plus else (0,) * self.num_stages
                costs[kind] = tuple(map(sub, total, *minus)) if minus else total
        return costs
