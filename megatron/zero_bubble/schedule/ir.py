"""The classes that describe a schedule: `Op`, `Placement`, `Schedule`.

A schedule is the order in which every pipeline rank runs its operations, without times and idle slots. `simulate`
computes the times and bubbles of a schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Literal, NamedTuple

from megatron.zero_bubble.schedule.errors import InvalidSchedule, ScheduleError
from megatron.zero_bubble.schedule.kinds import (
    COMMUNICATION,
    FORWARDS,
    MESSAGES,
    PAIRED,
    POST_VALIDATION,
    RESTORING,
    VOCABULARY,
    OpKind,
)

PlacementKind = Literal["linear", "interleaved", "v"]
MAX_STAGES = 4096
"""Largest number of stages of a placement; models have far fewer layers."""
MAX_OPERATIONS = 4_000_000
"""Largest total number of F, B and W in a schedule; planning such a schedule takes a minute and gigabytes of memory."""

_WORDS = {kind.value: kind for kind in OpKind} | {"WT": OpKind.W}
"""Name of a kind -> kind of operation. Release 0.1 wrote `WT` for a W after the last backward of a rank."""
_WORD = re.compile(r"(&?[A-Z_]+)(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)


class Op(NamedTuple):
    """One operation of one rank. `F3` is the forward of microbatch 3; `B3.1` is the B of microbatch 3 in chunk 1."""

    kind: OpKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        suffix = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.microbatch}{suffix}"

    @classmethod
    def parse(cls, word: str) -> Op:
        """Read an operation from text such as `F3` or `B3.1`.

        Raises:
            ScheduleError: `word` does not name an operation.
        """
        match = _WORD.fullmatch(word)
        if match is None or match[1] not in _WORDS:
            kinds = ", ".join(OpKind)
            raise ScheduleError(f"{word!r} is not an operation: expected a kind ({kinds}), a microbatch, as in F3")
        return cls(_WORDS[match[1]], int(match[2]), int(match[3] or 0))


@dataclass(frozen=True)
class Placement:
    """The assignment of stages to ranks and model chunks.

    Stages are numbered in model order, `0 .. num_stages - 1` with `num_stages = num_ranks * num_chunks`.

    - `linear`: one chunk on each rank; rank `r` has stage `r`.
    - `interleaved`: chunk `c` of rank `r` is stage `c * num_ranks + r` (Megatron's virtual pipeline).
    - `v`: like the placement `interleaved`, but the stages of odd chunks are assigned to the ranks in reverse order.
      In a V, chunk 1 of rank `r` is stage `2 * num_ranks - 1 - r`. In a V with two chunks per rank, the first stage
      and the last stage are on rank 0.
    """

    kind: PlacementKind
    num_ranks: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "interleaved", "v"):
            raise ScheduleError(f"placement {self.kind!r} is unknown: use linear, interleaved or v")
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise ScheduleError(
                f"a placement needs at least one rank and one chunk, got {self.num_ranks} and {self.num_chunks}"
            )
        if self.num_ranks * self.num_chunks > MAX_STAGES:
            raise ScheduleError(
                f"{self.num_ranks} pipeline ranks with {self.num_chunks} model chunks each are too many: "
                f"use at most {MAX_STAGES} stages"
            )
        if self.kind == "linear" and self.num_chunks != 1:
            raise ScheduleError(f"a linear placement has one chunk a rank, got {self.num_chunks}")
        if self.kind == "v" and self.num_chunks == 1:
            raise ScheduleError("a placement in a V has at least two chunks a rank, got 1: use linear")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of `stage`."""
        chunk, position = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - position if self._runs_back(chunk) else position

    def chunk_of(self, stage: int) -> int:
        """The chunk of `stage`, which is the index of the stage on its rank."""
        return stage // self.num_ranks

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        """The stage that is chunk `chunk` of `rank`."""
        position = self.num_ranks - 1 - rank if self._runs_back(chunk) else rank
        return chunk * self.num_ranks + position

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, in the order of the model chunks."""
        return self._stages[rank]

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        """Rank -> its stages."""
        chunks = range(self.num_chunks)
        return tuple(tuple(self.stage_of(rank, chunk) for chunk in chunks) for rank in range(self.num_ranks))

    def sums(self, values: Sequence[float]) -> tuple[float, ...]:
        """Rank -> sum of `values[stage]` over the stages of the rank."""
        return tuple(sum(map(values.__getitem__, stages)) for stages in self._stages)

    def peer_of(self, rank: int, op: Op) -> int:
        """The rank with which `rank` communicates in the send or receive `op`.

        If the neighbouring stage is on the same rank, as in the middle of a V, `peer_of` returns `rank`.
        """
        return self.rank_of(self.stage_of(rank, op.chunk) + MESSAGES[op.kind].neighbour)

    def _runs_back(self, chunk: int) -> bool:
        return self.kind == "v" and chunk % 2 == 1


def check_size(placement: Placement, num_microbatches: int) -> None:
    """Raise `ScheduleError` if a schedule for `num_microbatches` has more than `MAX_OPERATIONS` F, B and W."""
    most = MAX_OPERATIONS // (3 * placement.num_stages)
    if num_microbatches > most:
        raise ScheduleError(
            f"{num_microbatches} microbatches on {placement.num_stages} stages are too many: use at most {most}"
        )


@dataclass(frozen=True)
class Schedule:
    """The operations of every pipeline rank, in execution order.

    Generators make schedules of forwards and backwards; `lower` adds sends, receives and collectives.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ops: tuple[tuple[Op, ...], ...]
    """Rank -> operations of the rank, in execution order."""
    groups: tuple[int, ...] = ()
    """Stage -> number of groups into which the stage's layers are divided for recomputation; empty if each stage has
    one group. In a stage with several groups of layers, R (recomputation) recomputes the activations of the last group.
    For each group of layers except the last, B first recomputes the activations of the group and then computes the
    gradients of the group."""

    def __post_init__(self) -> None:
        if len(self.ops) != self.placement.num_ranks:
            raise ScheduleError(
                f"schedule {self.name}: operations for {len(self.ops)} ranks, "
                f"but the placement has {self.placement.num_ranks}"
            )
        if self.groups and (len(self.groups) != self.placement.num_stages or min(self.groups) < 1):
            raise ScheduleError(
                f"schedule {self.name}: groups must be one number above zero for each of "
                f"{self.placement.num_stages} stages"
            )

    def invalid(self, problem: str) -> InvalidSchedule:
        """Return an error that names the schedule and its problem."""
        return InvalidSchedule(f"schedule {self.name}: {problem}")

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def is_lowered(self) -> bool:
        """Whether the schedule has sends, receives or collectives."""
        return not self.kinds.isdisjoint(COMMUNICATION)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule has W as a separate operation."""
        return OpKind.W in self.kinds

    @property
    def recomputes(self) -> bool:
        """Whether any F drops activations; R or B then recomputes the dropped activations."""
        return OpKind.R in self.kinds or max(self.groups, default=1) > 1

    @property
    def offloads(self) -> bool:
        """Whether any activations are copied to the host and back."""
        return OpKind.D in self.kinds

    @property
    def is_vocabulary_parallel(self) -> bool:
        """Whether the schedule has operations on vocabulary shards."""
        return not self.kinds.isdisjoint(VOCABULARY)

    @property
    def has_pairs(self) -> bool:
        """Whether any forward and backward run as one operation."""
        return not self.kinds.isdisjoint(PAIRED)

    @property
    def has_post_validation(self) -> bool:
        """Whether ranks take the optimizer step before the norm of all gradients is known (post-validation)."""
        return not self.kinds.isdisjoint(POST_VALIDATION)

    @cached_property
    def kinds(self) -> frozenset[OpKind]:
        """The kinds of the operations of all ranks."""
        return frozenset(map(itemgetter(0), chain.from_iterable(self.ops)))

    @cached_property
    def op_sets(self) -> tuple[frozenset[Op], ...]:
        """Rank -> set of the operations of the rank."""
        return tuple(map(frozenset, self.ops))

    def require_stages(self, num_stages: int) -> None:
        """Raise `ScheduleError` if costs of `num_stages` stages do not fit the schedule."""
        if num_stages != self.num_stages:
            raise ScheduleError(
                f"schedule {self.name} has {self.num_stages} stages, but the costs are for {num_stages}"
            )

    def compute_ops(self, rank: int) -> Iterator[Op]:
        """The operations of `rank` except sends, receives and collectives."""
        return (op for op in self.ops[rank] if op.kind not in COMMUNICATION)

    def without(self, kinds: Set[OpKind]) -> Schedule:
        """The given schedule without communication and without operations of the kinds in `kinds`."""
        left_out = COMMUNICATION | kinds
        return replace(self, ops=tuple(tuple(op for op in ops if op.kind not in left_out) for ops in self.ops))

    def with_kinds(self, kinds: Callable[[int, Op], Iterable[OpKind]]) -> Schedule:
        """The given schedule with operations of the kinds `kinds(rank, op)`, in this order, in place of each `op`."""
        ops = (
            tuple(op if kind is op.kind else op._replace(kind=kind) for op in lane for kind in kinds(rank, op))
            for rank, lane in enumerate(self.ops)
        )
        return replace(self, ops=tuple(ops))

    def without_communication(self) -> Schedule:
        """The given schedule without the sends, receives and collectives that `lower` adds."""
        return self.without(COMMUNICATION) if self.is_lowered else self

    def forward_only(self) -> Schedule:
        """The schedule of an evaluation, which runs only the forwards of the given schedule, in the same order."""
        runs = FORWARDS - RESTORING
        forwards = tuple(tuple(op for op in ops if op.kind in runs) for ops in self.ops)
        return replace(self, name=f"{self.name} (forward only)", ops=forwards)

    def excerpt(self, rank: int, position: int, radius: int = 6) -> str:
        """The operations of `rank` around `position` as text for error messages.

        Args:
            radius: number of operations shown before and after `position`.
        """
        first = max(0, position - radius)
        window = self.ops[rank][first : position + radius + 1]
        words = [f"[{op}]" if first + i == position else str(op) for i, op in enumerate(window)]
        before = "... " if first else ""
        after = " ..." if position + radius + 1 < len(self.ops[rank]) else ""
        return f"rank {rank}: {before}{' '.join(words)}{after}"
