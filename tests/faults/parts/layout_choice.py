"""Faults of the layout choice."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="activation-limit-lost-beside-capacity",
        file="planner/layout_plan.py",
        old="    return left if limits is None else tuple(map(min, limits, left))",
        new="    return left",
        effect=(
            "A memory limit in bytes has no effect on the choice of the layout where the memory of the device is known."
        ),
    ),
    Fault(
        name="layers-leave-the-slowest-rank-only",
        file="planner/balance.py",
        old="""        excess = self._excess(cuts)
        load = excess if max(excess) > 0 else self._ends(cuts, self._works(cuts))""",
        new="        load = self._ends(cuts, self._works(cuts))",
        effect=(
            "Where a rank's states do not fit in memory, the search takes layers from the slowest rank and not "
            "from the full one, so that it finds no layout or a worse one."
        ),
    ),
    Fault(
        name="tied-embedding-counted-twice-in-shards",
        file="schedule/model_costs.py",
        old="        states = embedding.state + (0 if self.ties_output else output.state)",
        new="        states = embedding.state + output.state",
        effect=(
            "With tied embeddings, layouts with vocabulary shards are predicted to need more memory than they do, "
            "and may be refused."
        ),
    ),
    Fault(
        name="no-second-try-with-vocabulary-shards",
        file="planner/layouts.py",
        old="        vocabularies = (False, True) if request.vocabulary_parallel is None else (request.vocabulary_parallel,)",
        new="        vocabularies = (bool(request.vocabulary_parallel),)",
        effect=(
            "A model that fits in memory only with its vocabulary spread over the ranks is refused with the error "
            "that no layout fits."
        ),
    ),
    Fault(
        name="saved-layout-overrides-given-flags",
        file="session/layout_choice.py",
        old="""    allowed = all(getattr(flags, name) in (None, False, "auto", value) for name, value in others.items())
    beyond_fsdp = chosen["zero_bubble_recompute"] is not None or chosen["zero_bubble_vocabulary_parallel"] == "on"
    if not same or not allowed or (flags.use_torch_fsdp2 and beyond_fsdp):""",
        new="""    beyond_fsdp = chosen["zero_bubble_recompute"] is not None or chosen["zero_bubble_vocabulary_parallel"] == "on"
    if not same or (flags.use_torch_fsdp2 and beyond_fsdp):""",
        effect=(
            "A job that resumes with another placement or other vocabulary shards in its flags silently keeps "
            "those of the checkpoint."
        ),
    ),
    Fault(
        name="memory-multiple-applied-to-states",
        file="planner/megatrons_split.py",
        old="    return max(state + multiple * activations for state, activations in memory)",
        new="    return max(multiple * (state + activations) for state, activations in memory)",
        effect=(
            "With a memory limit that is another multiple than 1, the layout search multiplies parameters and "
            "optimizer states too, and so allows far more or far less than was asked for."
        ),
    ),
)
