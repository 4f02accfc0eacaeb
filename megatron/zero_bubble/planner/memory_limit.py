"""The memory limit of a rank's activations, as given by `--zero-bubble-memory-limit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from operator import add

from megatron.zero_bubble.planner.request import tolerance
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_pairs
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of a rank, for the activations in flight and the temporary memory of one operation together.

    At most one of `multiple` and `num_bytes` is given; if neither is given, the limit is the free memory of the device.
    """

    multiple: float | None = None
    """The memory limit as a multiple of the peak memory of 1F1B."""
    num_bytes: int | None = None
    """The memory limit in bytes."""
    is_interleaved: bool = False
    """Whether `multiple` refers to the peak of interleaved 1F1B, and not of 1F1B, if ranks have several chunks."""
    pairs: bool = False
    """Whether interleaved 1F1B runs forward-backward pairs, which keep one more microbatch of a chunk in flight."""
    group_size: int | None = None
    """Number of microbatches that pass through a chunk before the next chunk's turn; by default the number of ranks."""

    @classmethod
    def parse(cls, text: str) -> MemoryLimit:
        """Read a memory limit, such as `1.5` or `1.5x` for a multiple of 1F1B's peak, `40GiB` for bytes, or `auto`.

        Raises:
            ValueError: the text is neither a multiple, nor a number of bytes, nor `auto`.
        """
        word = text.strip().upper()
        if word == "AUTO":
            return cls()
        for unit, factor in _UNITS.items():
            if word.endswith(unit):
                num_bytes = _positive(word.removesuffix(unit), text) * factor
                if num_bytes < 1 or (factor == 1 and num_bytes % 1):
                    raise ValueError(f"{text!r} is not a memory limit: give a whole number of bytes")
                return cls(num_bytes=int(num_bytes))
        return cls(multiple=_positive(word.removesuffix("X"), text))

    @property
    def is_auto(self) -> bool:
        return self.multiple is None and self.num_bytes is None

    def in_unit_costs(
        self, placement: Placement, num_microbatches: int, recompute: Recompute = Recompute.NONE
    ) -> float | None:
        """The memory limit in the unit of `default_costs`; None if the limit is given in bytes or as `auto`."""
        if self.multiple is None:
            return None
        costs = default_costs(placement, recompute)
        return max(self.of_ranks(placement, costs, num_microbatches, None, recompute=recompute))

    def of_ranks(
        self,
        placement: Placement,
        costs: StageCosts,
        num_microbatches: int,
        free_bytes: int | None,
        inside: Sequence[float] = (),
        recompute: Recompute = Recompute.NONE,
    ) -> tuple[float, ...]:
        """Rank -> its memory limit in bytes; a multiple of a peak memory is converted with measured costs.

        Args:
            free_bytes: free memory for activations on the fullest device; used for `auto` only.
            inside: rank -> largest temporary memory of an operation on the rank; zero by default.
            recompute: which microbatches have an R (recomputation).
        """
        if self.multiple is not None:
            peaks_of: Callable[..., tuple[float, ...]] = one_f_one_b_peaks
            if self.is_interleaved and placement.num_chunks > 1:
                peaks_of = partial(interleaved_peaks, pairs=self.pairs, group_size=self.group_size)
            peaks = peaks_of(placement, costs, num_microbatches, recompute)
            return tuple(self.multiple * peak for peak in map(add, peaks, inside or (0,) * len(peaks)))
        in_bytes = self.num_bytes if self.num_bytes is not None else free_bytes
        assert in_bytes is not None
        return (in_bytes,) * placement.num_ranks


def beside_states(needed: Sequence[float], states: Sequence[float]) -> tuple[float, ...]:
    """Rank -> its memory limit, if each rank may take as much memory, with its states, as the rank that needs most.

    Args:
        needed: rank -> memory that the rank needs beside its states.
        states: rank -> memory of the rank's parameters, gradients and optimizer states.
    """
    capacity = max(map(add, needed, states))
    return tuple(capacity - own for own in states)


def in_peaks(ratio: float) -> str:
    """Return text with a memory limit as a multiple of 1F1B's peak, rounded up to three decimals."""
    return f"{rounded_up(ratio)} times 1F1B's peak"


def rounded_up(multiple: float) -> str:
    """Return text with a multiple of a peak memory, rounded up to three decimals."""
    return f"{ceil(multiple * 1000 - 1e-6) / 1000:g}"


def bytes_with_unit(num_bytes: float) -> str:
    """Return text with a number of bytes, rounded up, that a flag for a memory limit accepts, such as `1045MiB`."""
    unit, size = next(
        ((unit, size) for unit, size in (("MiB", 2**20), ("KiB", 2**10)) if num_bytes >= 100 * size), ("B", 1)
    )
    return f"{ceil(num_bytes / size)}{unit}"


def beyond_limit(name: str, limit_in_bytes: float, smallest: int, given: MemoryLimit | None) -> Infeasible:
    """Return the error for a schedule that does not fit in a memory limit.

    Args:
        name: name of the schedule.
        smallest: smallest memory limit in bytes that works.
        given: the limit that the user gave; None without one.
    """
    works = bytes_with_unit(smallest)
    if given is not None and given.multiple is not None:
        works += f", or {in_peaks(given.multiple * smallest / limit_in_bytes)}"
    return Infeasible(
        f"schedule {name} does not fit in the memory limit of {limit_in_bytes:.0f} bytes: the smallest that works is "
        f"{works}",
        smallest,
    )


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
    """Rank -> peak memory of 1F1B: rank r of p has min(m, p - r) of the m microbatches in flight on each of its chunks.

    The peak memory includes the memory that one B adds, and the memory that microbatches keep allocated from their W to
    the end of the step. With `Recompute.PLANNED`, the peak memory is the peak of 1F1B that keeps all activations.
    """
    peaks = []
    for rank in range(placement.num_ranks):
        stages, in_flight = placement.stages_of(rank), min(num_microbatches, placement.num_ranks - rank)
        added = max(0, *(costs.memory_b[stage] for stage in stages))
        left = (num_microbatches - in_flight) * memory_left(costs, stages)
        peaks.append(memory_in_flight(costs, stages, in_flight, recompute) + added + left)
    return tuple(peaks)


def memory_left(costs: StageCosts, stages: Sequence[int]) -> float:
    """Memory that F, B and W of a microbatch leave allocated on `stages` until the end of the step."""
    allocated = sum(costs.memory_f[stage] for stage in stages)
    left = allocated + sum(costs.memory_b[stage] + costs.memory_w[stage] for stage in stages)
    return left if left > tolerance(allocated) else 0.0


def memory_in_flight(costs: StageCosts, stages: Sequence[int], in_flight: float, recompute: Recompute) -> float:
    """Memory of `in_flight` microbatches that are between F and B on each of `stages`.

    Under full recomputation one microbatch has all activations, and the other microbatches lack the activations that R
    recomputes.
    """
    memory = in_flight * sum(costs.memory_f[stage] for stage in stages)
    if recompute is Recompute.FULL:
        memory -= (in_flight - 1) * sum(costs.memory_r[stage] for stage in stages)
    return memory


def interleaved_peaks(
    placement: Placement,
    costs: StageCosts,
    num_microbatches: int,
    recompute: Recompute = Recompute.NONE,
    *,
    pairs: bool = False,
    group_size: int | None = None,
) -> tuple[float, ...]:
    """Rank -> peak memory of interleaved 1F1B, for the chunks of `placement`.

    With `pairs`, interleaved 1F1B runs a forward and a backward as one operation. The number of microbatches is rounded
    up to a multiple of `group_size`, the number of microbatches that pass through a chunk before the next chunk's turn.
    By default `group_size` is the number of ranks, as in megatron-core.
    """
    p, size = placement.num_ranks, group_size or placement.num_ranks
    # With more than three groups of at least p microbatches the peaks stay the same, apart from `memory_left`.
    num_groups = min(3, -(-num_microbatches // size))
    left = max(0, num_microbatches - num_groups * size)
    own = interleaved_pairs if pairs and recompute is not Recompute.FULL else interleaved_1f1b
    schedule = own(p, num_groups * size, num_chunks=placement.num_chunks, group_size=size)
    if recompute is Recompute.FULL:
        schedule = with_recomputation(schedule)
    peaks = peak_memory(schedule, costs)
    return tuple(peak + left * memory_left(costs, placement.stages_of(rank)) for rank, peak in enumerate(peaks))
