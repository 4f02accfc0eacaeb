"""Reads the costs of every stage from flags or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from megatron.zero_bubble.cli.shared_flags import COSTS_OF_FLAGS, CostFlags
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.costs import SMALLEST
from megatron.zero_bubble.schedule.default_costs import DROPPED, with_host_link
from megatron.zero_bubble.schedule.formats import costs_from_text, is_profile
from megatron.zero_bubble.session.flags import flag_name

_DEFAULTS = {
    "time_comm": 0,
    "all_to_all_f": 0,
    "all_to_all_b": 0,
    "num_blocks": 0,
    "time_d": 0,
    "memory_f": 1,
    "memory_b": -0.5,
    "memory_w": -0.5,
}
_ROUNDING = 1e-6
"""Largest share of M_B by which the releases of B and W may exceed the allocation of F."""
BYTES_PER_MS = 1e6
"""Bytes a millisecond of a link of 1 GB/s."""
_PARTS_OF_F = {
    "time_r": ("time_f", 1),
    "memory_r": ("memory_f", DROPPED),
    "time_h": ("time_d", 1),
    "memory_d": ("memory_f", DROPPED),
}
"""For a field, the field, in most cases of F, of which it is a part by default, and which part."""


def stage_costs(flags: CostFlags, placement: Placement) -> StageCosts:
    """Return the costs of every stage of `placement`, with memory in M_B.

    Flags, and files with one entry a rank, give the costs of whole ranks, which are split among their chunks. M_B is
    the memory of F of one microbatch on a whole rank, on the rank where it is largest.

    Raises:
        ScheduleError: the number of entries does not fit the placement, or M_B is not above zero.
    """
    costs = _costs_of_ranks(flags, placement.num_ranks).split_ranks(placement)
    if flags.vocabulary_parallel is not None:
        share = flags.vocabulary_parallel / placement.num_ranks
        costs = costs.with_shards(placement, {"time_s": 2 * share, "time_t": share})
    if flags.costs is not None:
        costs = read_costs(flags.costs)
        if costs.num_stages == placement.num_ranks:
            costs = costs.split_ranks(placement)
        elif costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"{flags.costs} has costs of {costs.num_stages} stages: expected {placement.num_stages}, or "
                f"{placement.num_ranks} for whole ranks"
            )
        if flags.host_bandwidth is not None:
            costs = with_host_link(costs, flags.host_bandwidth * BYTES_PER_MS)
    memory_f = costs.whole_ranks(placement).memory_f
    if max(memory_f) < SMALLEST:
        raise ScheduleError(f"M_B, the memory of F on a whole rank, must be above zero, got {max(memory_f):g}")
    changes = costs.whole_ranks(placement)
    for rank, change in enumerate(zip(changes.memory_f, changes.memory_b, changes.memory_w, strict=True)):
        if sum(change) < -_ROUNDING * max(memory_f):
            raise ScheduleError(
                f"B and W of rank {rank} release more memory than F allocates: memory_f {change[0]:g}, memory_b "
                f"{change[1]:g} and memory_w {change[2]:g} must add up to 0 or more"
            )
    memory = {
        name: tuple(value / max(memory_f) for value in getattr(costs, name))
        for name in (field.name for field in fields(StageCosts) if field.name.startswith("memory_"))
    }
    return replace(costs, **memory)


def microbatch_bytes(flags: CostFlags, placement: Placement) -> float | None:
    """Return M_B in bytes if the costs are a profile, whose memory is in bytes."""
    if flags.costs is None or not is_profile(flags.costs.read_text(encoding="utf-8")):
        return None
    costs = read_costs(flags.costs)
    return max(costs.memory_f if costs.num_stages == placement.num_ranks else placement.sums(costs.memory_f))


def read_costs(path: Path) -> StageCosts:
    try:
        return costs_from_text(path.read_text(encoding="utf-8"))
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: {error}") from None


def _costs_of_ranks(flags: CostFlags, num_ranks: int) -> StageCosts:
    values: dict[str, tuple[float, ...]] = {}
    for name in COSTS_OF_FLAGS:
        given: Sequence[float] | None = getattr(flags, name)
        length = num_ranks - 1 if name == "time_comm" else num_ranks
        if given is None and name in _PARTS_OF_F:
            of_f, part = _PARTS_OF_F[name]
            given = [max(0, value * part) for value in values[of_f]]
        entries = (_DEFAULTS.get(name, flags.default_time),) if given is None else tuple(given)
        if len(entries) not in (1, length):
            raise ScheduleError(f"argument {flag_name(name)}: expected 1 number or {length}, got {len(entries)}")
        values[name] = entries * length if len(entries) == 1 else entries
    return StageCosts(**values)
