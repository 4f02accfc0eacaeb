"""The encoding of operations as integers, for the inner loops of the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from megatron.zero_bubble.schedule.kinds import OpKind

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

    def links(
        self, rank_of: Sequence[int], message: Sequence[float], collective: float | None
    ) -> tuple[tuple[int, int, float], ...]:
        """Tuples (code, code of an operation that needs the result, latency), one for each dependency of a microbatch.

        The dependencies of W and R are left out, because W and R need only a result of their own stage. The embedding
        of the first rank depends on no operation.

        Args:
            rank_of: stage -> rank.
            message: stage s -> latency of a message between stages s and s + 1.
            collective: time of a collective over all ranks; None without vocabulary shards.
        """
        links = [(stage, stage + 1, latency) for stage, latency in enumerate(message)]
        links += [(self.b + stage + 1, self.b + stage, latency) for stage, latency in enumerate(message)]
        if collective is None:
            return (*links, (self.b - 1, self.w - 1, 0.0))
        first, last = rank_of[0], rank_of[-1]
        links.append((self.loss, self.w - 1, 0.0))
        for rank in sorted(set(rank_of)):
            to_first, to_last = collective * (rank != first), collective * (rank != last)
            if rank != first:
                links.append((self.e + first, self.e + rank, collective))
            links += [(self.e + rank, self.f, to_first), (self.b, self.ew + rank, to_first)]
            links += [(self.b - 1, self.s + rank, to_last), (self.s + rank, self.loss, to_last)]
            links.append((self.loss, self.t + rank, to_last))
        return tuple(links)

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
