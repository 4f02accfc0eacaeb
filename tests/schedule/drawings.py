"""What the tests of drawings draw."""

from __future__ import annotations

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name="zb-h1", ranks=3, microbatches=4, **options):
    schedule = generate(name, ranks, microbatches, **options)
    return simulate(schedule, StageCosts.uniform(schedule.num_stages, 4, 3, 2, 1))
