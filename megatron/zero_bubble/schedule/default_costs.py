"""Default costs, for plans without measured costs."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute

DROPPED = 15 / 16
"""Default fraction of a layer's activations that full recomputation drops. Full recomputation keeps only the input of
the layer, 2 of 34 bytes for each token and hidden unit (Korthikanti et al. 2022, arXiv 2205.05198)."""


DEFAULT_SHARD = {"time_e": 0.02, "time_ew": 0.02, "time_s": 0.2, "time_t": 0.1}
"""Default times of the operations on the vocabulary shard of a rank, as fractions of the time of one stage's F.

With these times, on eight ranks with one layer each, the whole output layer takes 0.8 times as long as a layer.
"""


def default_costs(
    placement: Placement, recompute: Recompute = Recompute.NONE, *, vocabulary_parallel: bool = False
) -> StageCosts:
    """Costs with F = B = W = 1 on every stage, messages that take no time, and memory in M_B.

    Args:
        placement: placement of the stages. The activations of one microbatch on all chunks of a rank take 1 M_B of
            memory.
        recompute: whether the schedule has R (recomputation). R takes as long as F.
        vocabulary_parallel: whether every rank has a vocabulary shard. `DEFAULT_SHARD` defines the times of the
            operations on the vocabulary shard of a rank.
    """
    memory = 1 / placement.num_chunks
    restored = {} if recompute is Recompute.NONE else {"time_r": 1, "memory_r": DROPPED * memory}
    costs = StageCosts.uniform(placement.num_stages, 1, 1, 1, 0, memory, -memory / 2, -memory / 2, **restored)
    return costs.with_shards(placement, DEFAULT_SHARD) if vocabulary_parallel else costs


def with_host_link(costs: StageCosts, rate: float, stays: float | None = None) -> StageCosts:
    """Return `costs` with the times of copies to the host and back, computed from the rate of the host link.

    Args:
        costs: costs of the stages. The size of a copy to the host (`memory_d`) is computed from `memory_f` only if
            `memory_d` is zero on all stages.
        rate: memory that the host link copies per unit of time.
        stays: memory of a stage's input for one microbatch. The input of a stage is never copied to the host. By
            default the memory of the input is the fraction `1 - DROPPED` of the memory that F allocates.
    """
    copied = costs.memory_d
    if not any(copied):
        copied = tuple(max(0.0, each * DROPPED if stays is None else each - stays) for each in costs.memory_f)
    times = tuple(each / rate for each in copied)
    return replace(costs, memory_d=copied, time_d=times, time_h=times)
