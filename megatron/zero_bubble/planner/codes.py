"""The encoding of operations as integers, which the inner loops of the planner index with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.zero_bubble.schedule.kinds import OpKind

Order = list[int]
"""Operations of one rank as codes (see `Codes`), in microbatch order a stage.

The k-th F of a stage, whether it keeps or drops its activations, its k-th B and so on are those of microbatch k; its
k-th R is that of the k-th microbatch that is dropped.
"""


class Codes(NamedTuple):
    """The encoding of operations as integers: each kind has one for every stage, from its first code on.

    An operation on a vocabulary shard has the code of the first stage of its rank; of the losses only the first code
    is used.
    """

    f: int
    b: int
    w: int
    r: int
    drop: int
    """F that drops the activations which R makes again."""
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

    def is_weight_gradient(self, code: int) -> bool:
        """Whether the operation is a weight gradient, which nobody waits for."""
        return self.w <= code < self.r or self.ew <= code < self.s or code >= self.t

    def microbatches(self, order: Order) -> Iterator[tuple[int, int]]:
        """(code, microbatch) of every operation of an order."""
        counts = [0] * self.end
        dropped: list[list[int]] = [[] for _ in range(self.b)]
        """Stage -> the microbatches that are dropped and have had no R yet."""
        for code in order:
            if self.r <= code < self.drop:
                yield code, dropped[code - self.r].pop(0)
                continue
            kept = code - self.drop if self.drop <= code < self.e else code
            if kept != code:
                dropped[kept].append(counts[kept])
            yield code, counts[kept]
            counts[kept] += 1

    def f_and_b(self, orders: Sequence[Order]) -> list[Order]:
        """The F, all of which keep their activations, and the B of complete orders."""
        kept = [[code - self.drop if self.drop <= code < self.e else code for code in order] for order in orders]
        return [[code for code in order if code < self.w] for order in kept]
