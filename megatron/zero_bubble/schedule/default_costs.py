"""The costs of a schedule where nobody has measured any."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute

DROPPED = 15 / 16
"""The part of a layer's activations that full recomputation drops, by default: all but the layer's input, 2 of 34 bytes
a token and hidden unit (Korthikanti et al. 2022, arXiv 2205.05198)."""


DEFAULT_SHARD = {"time_e": 0.02, "time_ew": 0.02, "time_s": 0.2, "time_t": 0.1}
"""The times of a rank's vocabulary shard by default, where the F of a stage is 1.

On eight ranks with one layer each that is an output layer of 0.8 layers.
"""


def default_costs(
    placement: Placement, recompute: Recompute = Recompute.NONE, *, vocabulary_parallel: bool = False
) -> StageCosts:
    """F, B and W of one time unit a stage, no communication, and memory in M_B: 1 for all chunks of a rank together.

    R takes as long as F, where anything is recomputed, and vocabulary shards take `DEFAULT_SHARD`, where there are any.
    """
    chunks = placement.num_chunks
    costs = StageCosts.uniform(placement.num_stages, 1, 1, 1, 0, 1 / chunks, -0.5 / chunks, -0.5 / chunks)
    if recompute is not Recompute.NONE:
        restored = tuple(DROPPED * memory for memory in costs.memory_f)
        costs = replace(costs, time_r=costs.time_f, memory_r=restored)
    return costs.with_shards(placement, DEFAULT_SHARD) if vocabulary_parallel else costs


def with_host_link(costs: StageCosts, rate: float, stays: float | None = None) -> StageCosts:
    """The costs with copies to the host and back, each at `rate` memory a time unit, where none are measured.

    Args:
        costs: of the stages; those that have `memory_d` keep it.
        rate: of the host link, in the units of the costs.
        stays: memory of a microbatch that a stage never copies, its input; by default all but `DROPPED` of F's.
    """
    copied = costs.memory_d
    if not any(copied):
        copied = tuple(max(0.0, each * DROPPED if stays is None else each - stays) for each in costs.memory_f)
    times = tuple(each / rate for each in copied)
    return replace(costs, memory_d=copied, time_d=times, time_h=times)
