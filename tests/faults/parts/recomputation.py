"""Faults of the recomputation."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="random-state-moved-by-recomputation",
        file="mcore/checkpointed_blocks.py",
        old="""    with random._fork_rng(), torch.enable_grad():
""",
        new="""    with torch.enable_grad():
""",
        effect=(
            "With dropout every recomputation sets back the random state, so that later forwards draw other masks "
            "than without the schedule's recomputation."
        ),
    ),
    Fault(
        name="recomputed-without-autocast",
        file="pipeline/dropped_layers.py",
        old="""        with torch.random.fork_rng(devices=devices), torch.enable_grad(), self._autocast.forward():
""",
        new="""        with torch.random.fork_rng(devices=devices), torch.enable_grad():
""",
        effect=(
            "Checkpointed layers of a Pipeline under autocast run again in full precision, so their gradients and "
            "memory differ."
        ),
    ),
    Fault(
        name="recomputation-right-after-its-forward",
        file="schedule/recomputation.py",
        old="""    before: Op | None = None
    for op in ops:
        kind, microbatch, chunk = op
        if kind in BACKWARDS and before != (OpKind.F, microbatch, chunk):
            yield Op(OpKind.R, microbatch, chunk)
        yield op
        before = op
""",
        new="""    for op in ops:
        kind, microbatch, chunk = op
        if kind in BACKWARDS:
            yield Op(OpKind.R, microbatch, chunk)
        yield op
""",
        effect=(
            "Under full recomputation the last stage recomputes microbatches whose backward follows at once, "
            "which takes time and saves no memory."
        ),
    ),
    Fault(
        name="measuring-schedule-kept",
        file="runtime/replanner.py",
        old="""        return plan if self._plan.adapts or measured_another else None
""",
        new="""        return plan if self._plan.adapts else None
""",
        effect=(
            "A fixed schedule with recomputation goes on after profiling with the recomputations that were added "
            "only to measure them."
        ),
    ),
    Fault(
        name="dropped-activations-not-counted",
        file="runtime/profiler.py",
        old="""            return center(self._dropped[chunk]) + self._memory_of(chunk, OpKind.R, center)
""",
        new="""            return center(self._dropped[chunk])
""",
        effect=(
            "In a run that recomputes everything, the measured memory of a forward is that of its input alone, so "
            "plans exceed the memory limit."
        ),
    ),
    Fault(
        name="all-forwards-of-a-rank-drop",
        file="runtime/executor.py",
        old="""            drops, groups = (op.chunk, op.microbatch) in self._recomputed, self._groups[op.chunk]
""",
        new="""            drops, groups = bool(self._recomputed), self._groups[op.chunk]
""",
        effect=(
            "Where only some microbatches of a rank are recomputed, the others drop their activations as well, "
            "and their backward fails."
        ),
    ),
)
