"""The times that the zero-bubble paper published for its models (Qi et al. 2024, openreview tuzTN0eIO5)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.planner import placement_for
from megatron.zero_bubble.schedule import StageCosts


@dataclass(frozen=True)
class PublishedModel:
    """A model of the paper, with its pipeline size and the smallest number of microbatches in the experiments."""

    num_ranks: int
    num_microbatches: int
    times: tuple[float, float, float, float]
    """Milliseconds of F, B and W of one microbatch on a whole rank, and of one message."""


PUBLISHED = {
    "1.5B": PublishedModel(8, 24, (18.522, 18.086, 9.337, 0.601)),
    "6.2B": PublishedModel(8, 24, (29.718, 29.444, 19.927, 0.527)),
    "14.6B": PublishedModel(16, 48, (11.347, 11.248, 8.132, 0.377)),
    "28.3B": PublishedModel(32, 96, (10.419, 10.207, 7.715, 0.408)),
}


def costs_of(schedule: str, num_ranks: int, times: tuple[float, float, float, float]) -> StageCosts:
    """Return the costs of all stages under `schedule`.

    The chunks of a rank have equal parts of the rank's times and memory. B releases half of the memory of F.
    """
    placement = placement_for(schedule, num_ranks)
    f, b, w, message = times
    v = placement.num_chunks
    return StageCosts.uniform(placement.num_stages, f / v, b / v, w / v, message, 1 / v, -0.5 / v, -0.5 / v)
