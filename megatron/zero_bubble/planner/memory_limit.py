"""How much memory the activations of a rank may take: `--zero-bubble-memory-limit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_pairs
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of a rank's operations: the activations held, and the most that one operation needs inside.

    At most one of the two is given: `multiple` of 1F1B's peak, or `num_bytes`. With neither the limit is the free
    memory of the device.
    """

    multiple: float | None = None
    num_bytes: int | None = None
    is_interleaved: bool = False
    """Whether `multiple` is of interleaved 1F1B's peak, (p + (p-1)/v) M_B, where ranks have several chunks."""
    pairs: bool = False
    """Whether that is the peak with pairs of a forward and a backward, which hold another microbatch of a chunk."""

    @classmethod
    def parse(cls, text: str) -> MemoryLimit:
        """Read `1.5` or `1.5x`, `40GiB`, or `auto`.

        Raises:
            ValueError: it is none of these.
        """
        word = text.strip().upper()
        if word == "AUTO":
            return cls()
        for unit, factor in _UNITS.items():
            if word.endswith(unit):
                return cls(num_bytes=int(_positive(word.removesuffix(unit), text) * factor))
        return cls(multiple=_positive(word.removesuffix("X"), text))

    @property
    def is_auto(self) -> bool:
        return self.multiple is None and self.num_bytes is None

    def in_unit_costs(
        self, placement: Placement, num_microbatches: int, recompute: Recompute = Recompute.NONE
    ) -> float | None:
        """The limit in M_B, for a plan made before anything is measured; None if that cannot be said."""
        if self.multiple is None:
            return None
        costs = default_costs(placement, recompute)
        return self.multiple * max(self._peaks(placement)(placement, costs, num_microbatches, recompute))

    def in_bytes(
        self,
        placement: Placement,
        costs: StageCosts,
        num_microbatches: int,
        free_bytes: int | None,
        inside: Sequence[float] = (),
        recompute: Recompute = Recompute.NONE,
    ) -> float:
        """The limit in the unit of measured costs.

        Args:
            free_bytes: least memory that any device has free for activations; needed for `auto` alone.
            inside: for every rank, the most that an operation needs while it runs; zeros by default.
        """
        if self.multiple is not None:
            peaks = self._peaks(placement)(placement, costs, num_microbatches, recompute)
            return self.multiple * max(map(add, peaks, inside or (0,) * len(peaks)))
        if self.num_bytes is not None:
            return self.num_bytes
        assert free_bytes is not None
        return free_bytes

    def _peaks(self, placement: Placement) -> Callable[..., tuple[float, ...]]:
        """Computes the peaks of all ranks; the limit is a multiple of the largest."""
        if not self.is_interleaved or placement.num_chunks == 1:
            return one_f_one_b_peaks
        return partial(interleaved_peaks, pairs=self.pairs)


def _positive(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise ValueError(f"{text!r} is not a memory limit: give a multiple of 1F1B's peak (1.5), bytes (40GiB) or auto")
    return value


def one_f_one_b_peaks(
    placement: Placement, costs: StageCosts, num_microbatches: int, recompute: Recompute = Recompute.NONE
) -> tuple[float, ...]:
    """The peaks of 1F1B's ranks: rank r holds min(m, p - r) microbatches of all of its chunks.

    The oldest of them can hold more in its backward than it did since its forward. Where the planner chooses what to
    recompute, the limit is a multiple of 1F1B's peak if it keeps everything.
    """
    peaks = []
    for rank in range(placement.num_ranks):
        stages, num_held = placement.stages_of(rank), min(num_microbatches, placement.num_ranks - rank)
        added = max(0, *(costs.memory_b[stage] for stage in stages))
        peaks.append(held_memory(costs, stages, num_held, recompute) + added)
    return tuple(peaks)


def held_memory(costs: StageCosts, stages: Sequence[int], num_held: float, recompute: Recompute) -> float:
    """Memory of so many microbatches in all of these stages, between F and B.

    With full recomputation all but the oldest, which has had its R, lack the activations that R restores.
    """
    held = num_held * sum(costs.memory_f[stage] for stage in stages)
    if recompute is Recompute.FULL:
        held -= (num_held - 1) * sum(costs.memory_r[stage] for stage in stages)
    return held


def interleaved_peaks(
    placement: Placement,
    costs: StageCosts,
    num_microbatches: int,
    recompute: Recompute = Recompute.NONE,
    *,
    pairs: bool = False,
) -> tuple[float, ...]:
    """The peaks of interleaved 1F1B's ranks, for the chunks of `placement`, with pairs or without.

    The microbatches are rounded up to a multiple of the ranks, which megatron-core needs.
    """
    p = placement.num_ranks
    # After three groups of p microbatches the memory of the ranks repeats itself.
    num_groups = min(3, -(-num_microbatches // p))
    if recompute is Recompute.FULL:
        schedule = with_recomputation(interleaved_1f1b(p, num_groups * p, num_chunks=placement.num_chunks))
    else:
        own = interleaved_pairs if pairs else interleaved_1f1b
        schedule = own(p, num_groups * p, num_chunks=placement.num_chunks)
    return peak_memory(schedule, costs)
