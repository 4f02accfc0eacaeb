"""The times of the operations and messages of an emulated stage, and of two operations that run as a pair."""

from __future__ import annotations

from megatron.zero_bubble.schedule import Placement, StageCosts


class StageTimes:
    """Milliseconds of the operations and messages of one stage, and the memory of its activations."""

    def __init__(self, costs: StageCosts, placement: Placement, stage: int) -> None:
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == placement.num_stages - 1
        self.time_f, self.time_b, self.time_w = costs.time_f[stage], costs.time_b[stage], costs.time_w[stage]
        self.time_r = costs.time_r[stage]
        self.exchanged_f, self.exchanged_b = costs.all_to_all_f[stage], costs.all_to_all_b[stage]
        self.kept, self.restored, self.for_w = costs.memory_f[stage], costs.memory_r[stage], -costs.memory_w[stage]
        """Memory that F keeps if F drops nothing, memory that R restores, and memory that W needs."""
        self.offloaded = costs.memory_d[stage]
        """Part of the memory of F that can be copied to the host."""
        self.of_output = () if self.is_last else (_message_time(costs, placement, stage),)
        """Milliseconds of the message with the output; empty for the last stage."""
        self.of_gradient = () if self.is_first else (_message_time(costs, placement, stage - 1),)
        """Milliseconds of the message with the gradient of the input; empty for the first stage."""


def _message_time(costs: StageCosts, placement: Placement, edge: int) -> float:
    return costs.time_comm[edge] if placement.rank_of(edge) != placement.rank_of(edge + 1) else 0.0


_LAYERS = 4
"""Number of layers of every stage; a pair runs layers of its forward and of its backward in turn."""


def time_of_pair(forward: StageTimes, backward: StageTimes, time_w: float) -> float:
    """Milliseconds of a forward and a backward that run as a pair, on a rank with one compute stream and one link.

    The pair follows megatron-core's order, layer by layer. A part of an operation starts when the compute stream or the
    link is free, and when the previous part of the same operation is done. In each layer, the computation before and
    the computation after the exchange of tokens between experts take the same time.

    Args:
        time_w: milliseconds of W if the backward also computes weight gradients, else 0.
    """
    computed_f = (forward.time_f - forward.exchanged_f) / (2 * _LAYERS)
    computed_b = (backward.time_b + time_w - backward.exchanged_b) / (2 * _LAYERS)
    sent_f, sent_b = forward.exchanged_f / (2 * _LAYERS), backward.exchanged_b / (2 * _LAYERS)
    layer = (
        *(("link", "b", sent_b), ("rank", "f", computed_f), ("rank", "b", computed_b), ("link", "f", sent_f)),
        *(("link", "b", sent_b), ("rank", "f", computed_f), ("link", "f", sent_f), ("rank", "b", computed_b)),
    )
    free = dict.fromkeys(("link", "rank", "f", "b"), 0.0)
    for lane, operation, time_of_part in layer * _LAYERS:
        free[lane] = free[operation] = max(free[lane], free[operation]) + time_of_part
    return max(free.values())
