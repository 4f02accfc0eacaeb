"""The encoding of operations as integers, for the inner loops of the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.zero_bubble.schedule.kinds import OpKind

Order = list[int]
"""The operations of one rank as codes (see `Codes`), in the order in which they run.

The k-th F of a stage belongs to microbatch k, whether it keeps or drops activations; so do the k-th B and the k-th W.
The k-th R belongs to the k-th microbatch whose activations are dropped.
"""


class Codes(NamedTuple):
    """The first code of each kind of operation: stage s of a kind has the code `first code + s`.

    For operations on vocabulary shards the rank takes the place of the stage. The loss has one code for all ranks.
    """

    f: int
    b: int
    w: int
    r: int
    drop: int
    """An F that drops the activations which R recomputes."""
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
        """Yield (code, microbatch) for every operation of an order."""
        counts = [0] * self.end
        dropped: list[list[int]] = [[] for _ in range(self.b)]
        """Stage -> the microbatches whose activations are dropped and not yet recomputed."""
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
        """The F and B of complete orders, where every F keeps its activations."""
        kept = [[code - self.drop if self.drop <= code < self.e else code for code in order] for order in orders]
        return [[code for code in order if code < self.w] for order in kept]
