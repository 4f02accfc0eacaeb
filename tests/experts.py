"""The flag for pairs, and a plan with them, for tests of models with experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts
from megatron.zero_bubble.schedule.formats import schedule_to_json
from megatron.zero_bubble.schedule.kinds import PAIRED

OVERLAP = "--overlap-moe-expert-parallel-comm"


def pairs_in_a_file(folder: Path) -> str:
    """A plan of 8 microbatches for one chunk a rank, as the value of `--zero-bubble-schedule`: the pairs of the first
    rank leave W to later, and those of the second have it."""
    costs = replace(StageCosts.uniform(2), all_to_all_f=(0.3, 0.9), all_to_all_b=(0.3, 0.9))
    plan = generate("auto", 2, 8, costs=costs, memory_limit=4.0, pairs=True)
    assert plan.kinds >= PAIRED
    path = folder / "pairs.json"
    path.write_text(schedule_to_json(plan))
    return f"file:{path}"
