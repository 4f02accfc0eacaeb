"""The registry of schedules by name.

To add an algorithm, write a pure function and an entry in `_ENTRIES`. The entry's function makes the schedule from a
checked `PlanRequest` (see `PlanRequest.checked`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from megatron.zero_bubble.planner.auto import limit_of_1f1b, limits_in_flight, limits_of_multiple, planned
from megatron.zero_bubble.planner.optimal import optimal
from megatron.zero_bubble.planner.request import Limits, PlanRequest
from megatron.zero_bubble.schedule.errors import ScheduleError, UnknownSchedule
from megatron.zero_bubble.schedule.generators.dualpipe_v import dualpipe_v
from megatron.zero_bubble.schedule.generators.gpipe import gpipe
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_pairs, interleaved_zb
from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.generators.zb_h1 import zb_h1
from megatron.zero_bubble.schedule.generators.zb_h2 import zb_h2
from megatron.zero_bubble.schedule.ir import Placement, PlacementKind, Schedule

_NUM_CHUNKS: dict[PlacementKind, int] = {"linear": 1, "v": 2, "interleaved": 2}
"""Kind of placement -> default number of model chunks per rank."""


@dataclass(frozen=True)
class Entry:
    """One schedule of the registry."""

    name: str
    summary: str
    """Description of the schedule, its bubble and its memory, in one line."""
    placement: PlacementKind
    """Default kind of placement."""
    function: Callable[[PlanRequest], Schedule]
    """Function that makes the schedule from a checked request."""
    uses_costs: bool = False
    """Whether the schedule is planned from the costs, the memory limit and the recomputation of the request."""
    takes_limit: bool = False
    """Whether a request can set any memory limit for the schedule; otherwise the schedule has a fixed limit."""
    takes_placement: bool = False
    """Whether a request can set any kind of placement; otherwise the schedule has a fixed placement."""
    is_slow: bool = False
    """Whether planning takes seconds to minutes, so that commands make the schedule only if the user names it."""
    has_pairs: bool = False
    """Whether the schedule always has pairs; a pair is a forward and a backward that run as one operation."""
    has_own_limit: bool = True
    """Whether the schedule's name implies a memory limit; otherwise the default limit is the peak memory of 1F1B."""

    @property
    def num_chunks(self) -> int:
        """Default number of model chunks per rank."""
        return _NUM_CHUNKS[self.placement]

    @property
    def plans_all_kinds(self) -> bool:
        """Whether the planner places all kinds of operations, including pairs and operations on vocabulary shards."""
        return self.uses_costs and not self.is_slow

    @property
    def takes_num_chunks(self) -> bool:
        """Whether the number of model chunks per rank can be chosen; otherwise a rank has `num_chunks` chunks."""
        return self.takes_placement or self.placement == "interleaved"


def _generated(
    name: str, summary: str, kind: PlacementKind, generator: Callable[..., Schedule], **facts: bool
) -> Entry:
    """An entry for a schedule whose order of operations does not depend on costs."""

    def make(request: PlanRequest) -> Schedule:
        options = {"num_chunks": request.placement.num_chunks, "group_size": request.group_size}
        chosen = options if kind == "interleaved" else {}
        return generator(request.num_ranks, request.num_microbatches, **chosen)

    return Entry(name, summary, kind, make, **facts)


def _planned(
    name: str, summary: str, kind: PlacementKind, limits: Callable[[PlanRequest], Limits], **facts: bool
) -> Entry:
    """An entry for a schedule of the automatic scheduler; `limits` computes the default memory limits."""
    return Entry(name, summary, kind, partial(planned, limits), uses_costs=True, **facts)


_ENTRIES = (
    _generated("gpipe", "all F, then all backwards: bubble (p-1)(F+B+W), memory m M_B", "linear", gpipe),
    _generated("1f1b", "one F, one backward in turn: bubble (p-1)(F+B+W), memory p M_B", "linear", one_f_one_b),
    _generated(
        "interleaved-1f1b",
        "megatron-core's, v chunks a rank: bubble (p-1)(F+B+W)/v, memory (p+(p-1)/v) M_B",
        "interleaved",
        interleaved_1f1b,
    ),
    _generated(
        "interleaved-pairs",
        "megatron-core's with the messages between experts overlapped: a forward and a backward run as one",
        "interleaved",
        interleaved_pairs,
        has_pairs=True,
    ),
    _generated(
        "dualpipe-v",
        "DeepSeek's, placed in a V: a forward and a backward run as one, memory (p + 1/2) M_B",
        "v",
        dualpipe_v,
        has_pairs=True,
    ),
    _generated("zb-h1", "1F1B with W delayed: bubble (p-1)(F+B-W), memory p M_B", "linear", zb_h1),
    _generated("zb-h2", "longer warmup, W delayed: bubble (p-1)(F+B-2W), memory (2p-1) M_B", "linear", zb_h2),
    _planned("zb-1p", "planned from the costs in 1F1B's memory, p M_B", "linear", partial(limits_of_multiple, 1)),
    _planned(
        "zb-2p", "planned from the costs in 2p M_B: bubble close to zero", "linear", partial(limits_of_multiple, 2)
    ),
    _planned(
        "auto",
        "planned from the costs for any placement and memory limit, 1F1B's memory unless told otherwise",
        "linear",
        limit_of_1f1b,
        takes_limit=True,
        takes_placement=True,
        has_own_limit=False,
    ),
    Entry(
        "optimal",
        "the best that a constraint solver finds, or proves; small instances, needs `pip install '.[solver]'`",
        "linear",
        optimal,
        uses_costs=True,
        takes_limit=True,
        is_slow=True,
    ),
    _planned(
        "zb-v",
        "placed in a V: no bubble where F = B = W, memory p M_B",
        "v",
        partial(limits_in_flight, lambda p: p),
        takes_limit=True,
    ),
    _planned(
        "v-half",
        "placed in a V: about half of 1F1B's bubble where F = B = W, memory (p/2 + 1) M_B",
        "v",
        partial(limits_in_flight, lambda p: p / 2 + 1),
        takes_limit=True,
    ),
    _planned(
        "v-min",
        "placed in a V, for memory: about two thirds of 1F1B's bubble where F = B = W, memory (p/3 + 1) M_B",
        "v",
        partial(limits_in_flight, lambda p: p / 3 + 1),
        takes_limit=True,
    ),
    _generated(
        "interleaved-zb",
        "interleaved 1F1B with W delayed: bubble about (p-1)(F+B-2W)/v, memory (p+(p-1)/v) M_B",
        "interleaved",
        interleaved_zb,
    ),
)
ENTRIES: MappingProxyType[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def names() -> tuple[str, ...]:
    """The names of all schedules."""
    return tuple(ENTRIES)


def entry_of(name: str) -> Entry:
    """The registry's entry for the schedule `name`.

    Raises:
        UnknownSchedule: no schedule has this name. The error message lists the names of all schedules.
    """
    try:
        return ENTRIES[name]
    except KeyError:
        raise UnknownSchedule(f"schedule {name!r} is unknown: choose one of {', '.join(names())}") from None


def placement_for(
    name: str, num_ranks: int, num_chunks: int | None = None, kind: PlacementKind | None = None
) -> Placement:
    """The placement of a schedule on pipeline ranks.

    Args:
        name: name of the schedule.
        num_ranks: number of pipeline ranks.
        num_chunks: number of model chunks per rank; by default the schedule's own number of chunks.
        kind: kind of placement; by default the schedule's own kind if the schedule has a fixed placement. For any other
            schedule, the default is linear with one chunk per rank and interleaved with several chunks, as with
            Megatron's flags.

    Raises:
        UnknownSchedule: no schedule has this name.
        ScheduleError: the schedule does not support this kind of placement or this number of chunks.
    """
    entry = entry_of(name)
    if kind is None:
        several = entry.takes_placement and (num_chunks or entry.num_chunks) > 1
        kind = "interleaved" if several else entry.placement
    if kind not in _NUM_CHUNKS:
        raise ScheduleError(f"the kind of a placement is one of {', '.join(_NUM_CHUNKS)}, got {kind}")
    if kind != entry.placement and not entry.takes_placement:
        raise ScheduleError(f"schedule {name} has the placement {entry.placement}, not {kind}")
    own = _NUM_CHUNKS[kind]
    chunks = own if num_chunks is None else num_chunks
    if chunks != own and (kind == "v" or not entry.takes_num_chunks):
        raise ScheduleError(f"schedule {name} has {own} chunks a rank{' in a V' * (kind == 'v')}, got {chunks}")
    if chunks < 2 and kind == "interleaved":
        raise ScheduleError(f"schedule {name} needs at least 2 chunks a rank to interleave them, got {chunks}")
    return Placement(kind, num_ranks, chunks)
