"""Costs of stages that divide their layers into groups and recompute the activations of one group at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.zero_bubble.schedule.costs import COPY_COSTS, SMALLEST, StageCosts


def in_groups(costs: StageCosts, groups: Sequence[int]) -> StageCosts:
    """The costs of a schedule whose stages recompute their activations in several groups of layers.

    In a stage with several groups of layers, either F keeps the activations of the last group, or F drops the
    activations of the last group and R recomputes them. For each group of layers except the last, B first recomputes
    the activations of the group and then runs the backward of the group. B also computes the weight gradients of all
    groups of layers except the first. For each microbatch, the activations of at most one group of layers are therefore
    in memory at a time. D (offload) copies only activations that F keeps.

    Args:
        groups: stage -> number of groups of layers in the stage; an empty sequence stands for one group in every stage.
    """
    if max(groups, default=1) == 1:
        return costs
    names = ("time_b", "time_w", "time_r", "memory_f", "memory_b", "memory_w", "memory_r", *COPY_COSTS)
    columns = {name: list(getattr(costs, name)) for name in names}
    for stage, number in enumerate(groups):
        last, first = _parts(costs, stage, number)
        in_b = (1 - last) * costs.time_r[stage] + (1 - first) * costs.time_w[stage]
        kept = costs.memory_f[stage] - costs.memory_r[stage]
        after_b = costs.memory_f[stage] + costs.memory_b[stage]
        pending = after_b - (1 - first) * max(0, after_b - costs.memory_outside[stage])
        columns["time_b"][stage] += in_b
        columns["time_w"][stage] = max(first * columns["time_w"][stage], SMALLEST)
        columns["time_r"][stage] *= last
        columns["memory_r"][stage] *= last
        dropped = costs.memory_r[stage] - columns["memory_r"][stage]
        _copy(costs, columns, stage, max(0, costs.memory_d[stage] - dropped))
        columns["memory_f"][stage] = kept + columns["memory_r"][stage]
        columns["memory_b"][stage] = pending - columns["memory_f"][stage]
        columns["memory_w"][stage] = after_b + costs.memory_w[stage] - pending
    return replace(costs, saved_bw=(), **{name: tuple(values) for name, values in columns.items()})


def with_memory_of_all_groups(costs: StageCosts, groups: Sequence[int]) -> StageCosts:
    """Convert costs that were measured with several groups of layers to the costs of stages with one group each.

    `with_memory_of_all_groups` reverses the changes that `in_groups` makes to memory and to the times of copies.
    `with_memory_of_all_groups` does not change the times of computations.
    """
    if max(groups, default=1) == 1:
        return costs
    names = ("memory_f", "memory_b", "memory_w", "memory_r", *COPY_COSTS)
    columns = {name: list(getattr(costs, name)) for name in names}
    for stage, number in enumerate(groups):
        last, first = _parts(costs, stage, number)
        restored = costs.memory_r[stage]
        if number > 1 and not restored:  # without R, F keeps the last group's activations, because B follows at once
            restored = max(0, costs.memory_f[stage] - costs.memory_outside[stage])
        kept = costs.memory_f[stage] - restored
        pending = costs.memory_f[stage] + costs.memory_b[stage]
        after_b = pending + max(0, pending - costs.memory_outside[stage]) * (1 / first - 1)
        columns["memory_r"][stage] = restored / last
        dropped = restored / last - restored
        _copy(costs, columns, stage, costs.memory_d[stage] and costs.memory_d[stage] + dropped)
        columns["memory_f"][stage] = kept + columns["memory_r"][stage]
        columns["memory_b"][stage] = after_b - columns["memory_f"][stage]
        columns["memory_w"][stage] += pending - after_b
    return replace(costs, **{name: tuple(values) for name, values in columns.items()})


def _copy(costs: StageCosts, columns: Mapping[str, list[float]], stage: int, size: float) -> None:
    """Make `size` the memory that a stage copies to and from the host; scale the times of the copies in proportion."""
    for name in COPY_COSTS if costs.memory_d[stage] else ():
        columns[name][stage] *= size / costs.memory_d[stage]


def _parts(costs: StageCosts, stage: int, groups: int) -> tuple[float, float]:
    """Return the last group's and the first group's share of the blocks of layers in a stage."""
    blocks = costs.blocks(stage) or groups
    number = min(groups, blocks)
    return -(-blocks // number) / blocks, blocks // number / blocks
