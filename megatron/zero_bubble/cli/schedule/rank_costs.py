"""The costs of every stage, from flags or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from megatron.zero_bubble.cli.shared_flags import CostFlags
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.costs import SMALLEST
from megatron.zero_bubble.schedule.formats import costs_from_text

_DEFAULTS = {"time_comm": 0, "memory_f": 1, "memory_b": -0.5, "memory_w": -0.5}


def stage_costs(flags: CostFlags, placement: Placement) -> StageCosts:
    """The costs of every stage of `placement`, memory in M_B.

    Flags, and files with one entry a rank, are for whole ranks. M_B is the memory of F of one microbatch on a
    whole rank, on the rank where it is largest.
    """
    costs = split_costs(_costs_of_ranks(flags, placement.num_ranks), placement)
    if flags.costs is not None:
        costs = read_costs(flags.costs)
        if costs.num_stages == placement.num_ranks:
            costs = split_costs(costs, placement)
        elif costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"{flags.costs} has costs of {costs.num_stages} stages: expected {placement.num_stages}, or "
                f"{placement.num_ranks} for whole ranks"
            )
    held = [sum(costs.memory_f[stage] for stage in stages) for stages in _stages_of_ranks(placement)]
    if max(held) < SMALLEST:
        raise ScheduleError(f"M_B, the memory of F on a whole rank, must be above zero, got {max(held):g}")
    memory = {
        name: tuple(value / max(held) for value in getattr(costs, name))
        for name in ("memory_f", "memory_b", "memory_w")
    }
    return replace(costs, **memory)


def _stages_of_ranks(placement: Placement) -> list[list[int]]:
    chunks = range(placement.num_chunks)
    return [[placement.stage_of(rank, chunk) for chunk in chunks] for rank in range(placement.num_ranks)]


def read_costs(path: Path) -> StageCosts:
    try:
        return costs_from_text(path.read_text(encoding="utf-8"))
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: {error}") from None


def _costs_of_ranks(flags: CostFlags, num_ranks: int) -> StageCosts:
    values: dict[str, tuple[float, ...]] = {}
    for name in (field.name for field in fields(StageCosts)):
        given: Sequence[float] | None = getattr(flags, name)
        length = num_ranks - 1 if name == "time_comm" else num_ranks
        entries = (_DEFAULTS.get(name, flags.default_time),) if given is None else tuple(given)
        if len(entries) not in (1, length):
            raise ScheduleError(
                f"argument --{name.replace('_', '-')}: expected 1 number or {length}, got {len(entries)}"
            )
        values[name] = entries * length if len(entries) == 1 else entries
    return StageCosts(**values)


def split_costs(costs: StageCosts, placement: Placement) -> StageCosts:
    """Costs of whole ranks, in equal parts for the chunks.

    A message takes as long between chunks as between ranks. Where an interleaved placement goes from the last
    rank back to the first, no entry says how long that takes: the longest is taken.
    """
    if placement.num_chunks == 1:
        return costs
    ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    per_stage = {
        field.name: tuple(getattr(costs, field.name)[rank] / placement.num_chunks for rank in ranks)
        for field in fields(costs)
        if field.name != "time_comm"
    }
    comm = []
    for here, there in pairwise(ranks):
        adjacent = abs(here - there) == 1
        comm.append(costs.time_comm[min(here, there)] if adjacent else max(costs.time_comm, default=0))
    return replace(costs, **per_stage, time_comm=tuple(comm))
