"""The schedules by name.

An algorithm is one file with one pure function `(num_ranks, num_microbatches, *, ...) -> Schedule`, and one
entry in `ENTRIES`. The entry's `options` say which of the keywords of `generate` the function takes;
`generate` checks all of them, whether the function takes them or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from megatron.zero_bubble.schedule.collector import paused_collector
from megatron.zero_bubble.schedule.costs import LARGEST, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError, UnknownSchedule
from megatron.zero_bubble.schedule.generators.auto import auto, in_multiple_of_1f1b
from megatron.zero_bubble.schedule.generators.gpipe import gpipe
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_zb
from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.generators.optimal import optimal
from megatron.zero_bubble.schedule.generators.sharded import best_with_vocabulary
from megatron.zero_bubble.schedule.generators.v_shaped import in_v
from megatron.zero_bubble.schedule.generators.zb_h1 import zb_h1
from megatron.zero_bubble.schedule.generators.zb_h2 import zb_h2
from megatron.zero_bubble.schedule.ir import Placement, PlacementKind, Schedule, check_size
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.periodic import extended, fewer_microbatches, is_long
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.search.problem import BUDGET

MemoryLimit = float | Sequence[float]
"""One limit for all ranks, or one a rank, in the unit of the costs' memory."""


@dataclass(frozen=True)
class Entry:
    """One schedule of the registry."""

    name: str
    summary: str
    """One line: what the schedule is, its bubble and its memory."""
    placement: PlacementKind
    """The kind of its placement, unless told otherwise."""
    num_chunks: int
    """Model chunks a rank, unless told otherwise."""
    function: Callable[..., Schedule]
    options: frozenset[str] = frozenset()
    """The keywords of `generate` that `function` takes, always all of them: `costs`, `num_chunks`, `memory_limit`
    (one a rank, or None), `group_size`, `overlap_communication`, `post_validation`, `recompute`; or `placement`, of any
    kind. One that does not take `recompute` makes a schedule without R, from costs whose B has the time of R."""
    is_slow: bool = False
    """Whether it takes seconds to minutes: no command makes it unless it is named."""
    has_own_limit: bool = True
    """Whether the name stands for an amount of memory; otherwise a job gives it a limit, 1F1B's peak by default."""

    @property
    def uses_costs(self) -> bool:
        """Whether it makes another schedule for other costs."""
        return "costs" in self.options

    @property
    def takes_num_chunks(self) -> bool:
        """Whether the model chunks a rank can be chosen, and are not always `num_chunks`."""
        return "num_chunks" in self.options or self.takes_placement

    @property
    def takes_placement(self) -> bool:
        """Whether it plans for a placement of any kind, and not always for its own."""
        return "placement" in self.options

    @property
    def plans_recomputation(self) -> bool:
        """Whether it decides itself where R stands, and which microbatches have one."""
        return "recompute" in self.options


_INTERLEAVED = frozenset({"num_chunks", "group_size"})
_PLANNED_IN_OWN_LIMIT = frozenset({"costs", "overlap_communication", "recompute", "budget"})
_PLANNED = _PLANNED_IN_OWN_LIMIT | {"memory_limit"}

_ENTRIES = (
    Entry("gpipe", "all F, then all backwards: bubble (p-1)(F+B+W), memory m M_B", "linear", 1, gpipe),
    Entry("1f1b", "one F, one backward in turn: bubble (p-1)(F+B+W), memory p M_B", "linear", 1, one_f_one_b),
    Entry(
        "interleaved-1f1b",
        "megatron-core's, v chunks a rank: bubble (p-1)(F+B+W)/v, memory (p+(p-1)/v) M_B",
        "interleaved",
        2,
        interleaved_1f1b,
        _INTERLEAVED,
    ),
    Entry("zb-h1", "1F1B with W delayed: bubble (p-1)(F+B-W), memory p M_B", "linear", 1, zb_h1),
    Entry("zb-h2", "longer warmup, W delayed: bubble (p-1)(F+B-2W), memory (2p-1) M_B", "linear", 1, zb_h2),
    Entry(
        "zb-1p",
        "planned from the costs in 1F1B's memory, p M_B",
        "linear",
        1,
        partial(in_multiple_of_1f1b, "zb-1p", 1),
        _PLANNED_IN_OWN_LIMIT,
    ),
    Entry(
        "zb-2p",
        "planned from the costs in 2p M_B: bubble close to zero",
        "linear",
        1,
        partial(in_multiple_of_1f1b, "zb-2p", 2),
        _PLANNED_IN_OWN_LIMIT,
    ),
    Entry(
        "auto",
        "planned from the costs for any placement and memory limit, 2p M_B unless told otherwise",
        "linear",
        1,
        auto,
        _PLANNED | {"placement", "group_size", "post_validation"},
        has_own_limit=False,
    ),
    Entry(
        "optimal",
        "the best that a constraint solver finds, or proves; small instances, needs the extra solver",
        "linear",
        1,
        optimal,
        _PLANNED - {"budget"},
        is_slow=True,
    ),
    Entry("zb-v", "placed in a V: no bubble where F = B = W, memory p M_B", "v", 2, partial(in_v, "zb-v"), _PLANNED),
    Entry(
        "v-half",
        "placed in a V: about half of 1F1B's bubble where F = B = W, memory (p/2 + 1) M_B",
        "v",
        2,
        partial(in_v, "v-half"),
        _PLANNED,
    ),
    Entry(
        "v-min",
        "placed in a V, for memory: about two thirds of 1F1B's bubble where F = B = W, memory (p/3 + 1) M_B",
        "v",
        2,
        partial(in_v, "v-min"),
        _PLANNED,
    ),
    Entry(
        "interleaved-zb",
        "interleaved 1F1B with W delayed: bubble about (p-1)(F+B-2W)/v, memory (p+(p-1)/v) M_B",
        "interleaved",
        2,
        interleaved_zb,
        _INTERLEAVED,
    ),
)
ENTRIES: MappingProxyType[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def names() -> tuple[str, ...]:
    """The names of all schedules."""
    return tuple(ENTRIES)


def entry_of(name: str) -> Entry:
    """The registry's entry for `name`. Raises `UnknownSchedule`, listing all names."""
    try:
        return ENTRIES[name]
    except KeyError:
        raise UnknownSchedule(f"schedule {name!r} is unknown: choose one of {', '.join(names())}") from None


def placement_for(
    name: str, num_ranks: int, num_chunks: int | None = None, kind: PlacementKind | None = None
) -> Placement:
    """The placement of the schedule `name`: what its costs have to be measured for.

    `num_chunks` are the model chunks a rank, the schedule's own number by default. `kind` is that of a schedule for any
    placement; by default one chunk a rank is linear, and several are interleaved, as with Megatron's flags. Raises
    `UnknownSchedule`, and `ScheduleError` if the schedule is for another placement.
    """
    entry = entry_of(name)
    if kind is None:
        several = entry.takes_placement and (num_chunks or entry.num_chunks) > 1
        kind = "interleaved" if several else entry.placement
    if kind != entry.placement and not entry.takes_placement:
        raise ScheduleError(f"schedule {name} has the placement {entry.placement}, not {kind}")
    own = entry.num_chunks if kind == entry.placement else 2
    chunks = own if num_chunks is None else num_chunks
    if chunks != own and (kind == "v" or not entry.takes_num_chunks):
        raise ScheduleError(f"schedule {name} has {own} chunks a rank{' in a V' * (kind == 'v')}, got {chunks}")
    if chunks < 2 and kind == "interleaved":
        raise ScheduleError(f"schedule {name} needs at least 2 chunks a rank to interleave them, got {chunks}")
    return Placement(kind, num_ranks, chunks)


@paused_collector()
def generate(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: StageCosts | None = None,
    num_chunks: int | None = None,
    placement_kind: PlacementKind | None = None,
    memory_limit: MemoryLimit | None = None,
    group_size: int | None = None,
    overlap_communication: bool = True,
    post_validation: bool = False,
    recompute: Recompute = Recompute.NONE,
    vocabulary_parallel: bool = False,
    budget: int = BUDGET,
) -> Schedule:
    """The schedule `name` for `num_ranks` pipeline ranks and `num_microbatches` microbatches, without communication.

    `costs` are those of every stage (unit costs by default: `default_costs`), `num_chunks` the model chunks a rank and
    `placement_kind` where `auto` has them (both as in `placement_for`), `memory_limit` what the operations of a rank
    may hold at once, for all ranks or one a rank, in the unit of the costs' memory, `group_size` how many microbatches
    an interleaved schedule takes through a chunk before it goes on to the next (the number of ranks by default, or what
    is planned), `overlap_communication` whether ranks compute while messages are on their way, as in `simulate`,
    `post_validation` whether iterations will interlock, `recompute` which microbatches have an R,
    `vocabulary_parallel` whether embedding and output layer are spread over all ranks, `budget` how many operations
    a planner may plan in all its candidates.

    Raises `UnknownSchedule`; `Infeasible` if no schedule of this kind fits under the memory limit;
    `ScheduleError` for anything else that is wrong, in one line.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"schedule {name} needs at least one rank and one microbatch, got {num_ranks} and {num_microbatches}"
        )
    entry = entry_of(name)
    placement = placement_for(name, num_ranks, num_chunks, placement_kind)
    check_size(placement, num_microbatches)
    if group_size is not None and placement.kind != "interleaved":
        raise ScheduleError(f"schedule {name} has no microbatch groups, got a group size of {group_size}")
    if costs is not None and costs.num_stages != placement.num_stages:
        raise ScheduleError(
            f"schedule {name} on {num_ranks} ranks has {placement.num_stages} stages, "
            f"but the costs are for {costs.num_stages}"
        )
    limits = None if memory_limit is None else _limit_per_rank(memory_limit, num_ranks)
    costs = costs or default_costs(placement, recompute, vocabulary_parallel=vocabulary_parallel)
    if recompute is Recompute.NONE:
        costs = costs.keeping_everything()
    if recompute is Recompute.PLANNED and not entry.plans_recomputation:
        able = ", ".join(name for name, one in ENTRIES.items() if one.plans_recomputation)
        raise ScheduleError(f"schedule {name} does not plan recomputation: choose one of {able}")
    gets_recomputed = recompute is Recompute.FULL and not entry.plans_recomputation
    available = {
        "num_chunks": placement.num_chunks,
        "placement": placement,
        "group_size": group_size,
        "overlap_communication": overlap_communication,
        "post_validation": post_validation,
        "recompute": recompute,
        "budget": budget,
    }

    def search(num_microbatches: int, costs: StageCosts, limits: tuple[float, ...] | None) -> Schedule:
        given = {"costs": costs.recomputing_in_backward() if gets_recomputed else costs, "memory_limit": limits}
        options = {key: value for key, value in (available | given).items() if key in entry.options}
        schedule = entry.function(num_ranks, num_microbatches, **options)
        return with_recomputation(schedule) if gets_recomputed else schedule

    def make(costs: StageCosts, limits: tuple[float, ...] | None) -> Schedule:
        for fewer in fewer_microbatches(placement, num_microbatches) if entry.uses_costs else ():
            shorter = search(fewer, costs, limits)
            schedule = extended(shorter, num_microbatches, costs, limits, overlap_communication=overlap_communication)
            if schedule is not None:
                return schedule
        return search(num_microbatches, costs, limits)

    if vocabulary_parallel:
        long = is_long(placement, num_microbatches)
        schedule = best_with_vocabulary(make, placement, costs, limits, is_quick=budget == 0, is_long=long)
    else:
        schedule = make(costs, limits)
    if limits is not None:
        _check_memory(schedule, costs, limits)
    return schedule


def _limit_per_rank(memory_limit: MemoryLimit, num_ranks: int) -> tuple[float, ...]:
    limits = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * num_ranks
    if len(limits) != num_ranks:
        raise ScheduleError(f"memory_limit has {len(limits)} entries, but there are {num_ranks} ranks")
    for limit in limits:
        if not limit > 0:
            raise ScheduleError(f"memory_limit must be above zero, got {limit}")
    return tuple(min(limit, LARGEST) for limit in limits)


def _check_memory(schedule: Schedule, costs: StageCosts, limits: Sequence[float]) -> None:
    """Refuse a schedule that needs more than the limit: one whose generator cannot adapt it."""
    peaks = peak_memory(schedule, costs)
    for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        if peak > limit * (1 + 1e-9):
            raise Infeasible(
                f"on rank {rank} schedule {schedule.name} needs {peak:g} of memory, above the limit of {limit:g}; "
                f"{max(peaks):g} is enough for every rank",
                max(peaks),
            )
