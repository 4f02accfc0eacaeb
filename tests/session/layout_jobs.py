"""Jobs whose layout is chosen, and the costs of the models that they train."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.planner import Plan
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import chunks_of_flags
from megatron.zero_bubble.session.layout_choice import LayoutChoice

MIB = 2.0**20
LAYER = UnitCosts(1, 1, 0.8, memory_f=MIB, memory_b=-0.5 * MIB, memory_w=-0.5 * MIB, time_r=1, memory_r=0.9 * MIB)
OUTPUT = UnitCosts(3, 3, 3, memory_f=0.5 * MIB, memory_b=-0.2 * MIB, memory_w=-0.3 * MIB, state=4 * MIB)
MODEL = ModelCosts(UnitCosts(0.01, 0, 0.01, state=4 * MIB), (LAYER,) * 8, OUTPUT, 0.05)
HEAVY = replace(MODEL, output=replace(OUTPUT, time_f=6, time_b=6, time_w=6), layers=(LAYER,) * 16)


def flags(**given: object) -> JobFlags:
    known = {"pipeline_model_parallel_size": 4, "num_layers": 8, "global_batch_size": 8, "world_size": 4}
    made = JobFlags(**{"zero_bubble": True, **known, **given})
    return JobFlags(**{**vars(made), "model_chunks": chunks_of_flags(made)})


def all_of(found: LayoutChoice) -> list[Plan]:
    """The chosen plan and the others."""
    return [found.plan, *found.plan.others]


WHOLE = flags(zero_bubble_placement="linear", zero_bubble_vocabulary_parallel="off")
"""One chunk a rank, with a whole embedding and output layer."""
