"""The encoding of operations as integers, for the inner loops of the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from megatron.zero_bubble.schedule.graph import sources, stages_of_kind
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.kinds import VOCABULARY, OpKind, Place

Order = list[int]
"""The operations of one rank as codes (see `Codes`), in order. The k-th F, B and W of a stage belong to microbatch k;
the k-th R belongs to the k-th microbatch whose activations the stage drops."""


class Codes(NamedTuple):
    """The first code of each kind of operation; on stage s, an operation has the code `first code + s`.

    An operation on the vocabulary shard of rank r has the code `first code + r`. The loss has one code for all ranks.
    """

    f: int
    b: int
    w: int
    r: int
    drop: int
    """First code of the F that drop their activations; R (recomputation) restores these activations."""
    e: int
    ew: int
    s: int
    loss: int
    t: int
    end: int

    @classmethod
    def of(cls, num_stages: int) -> Codes:
        return cls(*range(0, num_stages * len(cls._fields), num_stages))

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The kinds of the operations, in the order of their codes."""
        words = {"drop": "F", "loss": "L"}
        return tuple(OpKind(words.get(name, name.upper())) for name in self._fields[:-1])

    def costs(self, **of_kinds: Sequence[float]) -> tuple[float, ...]:
        """Code of an operation -> cost of the operation.

        A keyword argument names a kind of operation, such as `f` for F, and gives the cost of the operation on every
        stage. Kinds of operations without a keyword argument have a cost of zero.
        """
        size = self.b - self.f
        return tuple(chain.from_iterable(of_kinds.get(name, (0,) * size) for name in self._fields[:-1]))

    @property
    def first(self) -> dict[OpKind, int]:
        """Kind of operation -> its first code; for F, the first code of the F that keep their activations."""
        return {kind: code for kind, code in zip(self.kinds, self, strict=False) if code != self.drop}

    @property
    def on_shards(self) -> tuple[int, ...]:
        """The first codes of the operations on vocabulary shards, and the code of the loss."""
        return self[self._fields.index("e") : -1]

    def links(
        self, placement: Placement, message: Sequence[float], collective: float | None
    ) -> Iterator[tuple[int, int, float]]:
        """Yield (code, code of an operation that needs the result, latency) for each dependency of a microbatch.

        The dependencies follow from the inputs in `KINDS`. Dependencies within a stage are left out, except the
        dependency of B on F in the last stage of a model without vocabulary shards; with vocabulary shards, this B
        needs the loss. W and R need only results of their own stage.

        Args:
            placement: placement of the stages on the ranks.
            message: stage s -> latency of a message between stages s and s + 1.
            collective: time of a collective over all ranks; None without vocabulary shards.
        """
        first, has_shards = self.first, collective is not None
        shards = [kind for kind in first if has_shards and kind in VOCABULARY]

        def code_of(kind: OpKind, stage: int) -> int:
            return self.loss if kind is OpKind.L else first[kind] + stage

        for kind in (OpKind.F, OpKind.B, *shards):
            for stage in stages_of_kind(placement, kind):
                for source in sources(placement, kind, stage):
                    result, place = source.need.result, source.need.place
                    if place is not Place.SAME_STAGE and (has_shards or result not in VOCABULARY):
                        shared = (collective or 0.0) * source.is_remote
                        latency = shared if source.edge is None else message[source.edge]
                        yield code_of(result, source.stage), code_of(kind, stage), latency
        if not has_shards:
            yield self.b - 1, self.w - 1, 0.0

    def microbatches(self, order: Order) -> Iterator[tuple[int, int]]:
        """Yield (code, microbatch) for every operation of an order."""
        counts = [0] * self.end
        dropped: list[list[int]] = [[] for _ in range(self.b)]
        """Stage -> the microbatches whose activations are dropped and not yet recomputed."""
        for code in order:
            if self.r <= code < self.drop:
                yield code, dropped[code - self.r].pop(0)
                continue
            kept = self.keeping(code)
            if kept != code:
                dropped[kept].append(counts[kept])
            yield code, counts[kept]
            counts[kept] += 1

    def keeping(self, code: int) -> int:
        """For an F that drops activations, return the code of an F that keeps them; return other codes unchanged."""
        return code - self.drop if self.drop <= code < self.e else code

    def f_and_b(self, orders: Sequence[Order]) -> list[Order]:
        """Return the orders of all ranks with only F and B; in the returned orders every F keeps its activations."""
        return [[code for code in map(self.keeping, order) if code < self.w] for order in orders]
