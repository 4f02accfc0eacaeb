"""Faults of the planner."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="fused-backward-halved",
        file="runtime/plan_check.py",
        old="    measured = _in_planned_proportions(planned, measured, schedule)\n",
        new="",
        effect=(
            "After steps in megatron-core's order, whose backwards are all fused, a job takes half of the backward's "
            "time as the time of W, and plans W into gaps that are too short."
        ),
    ),
    Fault(
        name="local-search-stale-memory",
        file="planner/order_moves.py",
        old="""        self._memory[move.rank] = self._memory_of(move.rank)
        return""",
        new="        return",
        effect=(
            "Under a tight memory limit the local search judges later moves by the memory before the first one, "
            "so that it refuses moves that fit, or its plan needs more memory than the limit."
        ),
    ),
    Fault(
        name="memory-limit-with-few-microbatches",
        file="planner/memory_limit.py",
        old="        stages, in_flight = placement.stages_of(rank), min(num_microbatches, placement.num_ranks - rank)",
        new="        stages, in_flight = placement.stages_of(rank), placement.num_ranks - rank",
        effect=(
            "With fewer microbatches than pipeline ranks, a memory limit given as a multiple of 1F1B's peak "
            "allows more memory than 1F1B really takes."
        ),
    ),
    Fault(
        name="receiver-free-without-overlap",
        file="schedule/simulate.py",
        old="        if not any(wait.num_before or wait.is_optional or wait.occupies for wait in waits):",
        new="        if not any(wait.num_before or wait.is_optional for wait in waits):",
        effect=(
            "Where communication does not overlap, the simulation lets a rank compute while it receives, so that "
            "predicted times and bubbles are too small."
        ),
    ),
    Fault(
        name="periodic-divides-by-one-period-too-many",
        file="planner/periodic.py",
        old="        time = (times[1] - times[0]) / (repeats * period.length)",
        new="        time = (times[1] - times[0]) / ((1 + repeats) * period.length)",
        effect=(
            "A schedule for very many microbatches repeats a period that only seems fast, so that a long "
            "iteration is planned slower than need be."
        ),
    ),
    Fault(
        name="gradient-order-checked-by-kind",
        file="schedule/validate.py",
        old="""            before = last.get((result, chunk))
            if before is not None and before.microbatch > microbatch:
                raise schedule.invalid(
                    f"rank {rank} runs {op} after {before}: {KINDS[result].in_order} of a stage go in microbatch order"
                )
            last[result, chunk] = op""",
        new="""            before = last.get((kind, chunk))
            if before is not None and before.microbatch > microbatch:
                raise schedule.invalid(
                    f"rank {rank} runs {op} after {before}: {KINDS[result].in_order} of a stage go in microbatch order"
                )
            last[kind, chunk] = op""",
        effect=(
            "A schedule file that mixes fused backwards with split ones is called valid although it adds "
            "gradients up in another order than by microbatch."
        ),
    ),
    Fault(
        name="v-back-to-back-keeps-the-full-limit",
        file="planner/v_shaped.py",
        old="    limits = tuple(map(sub, problem.limits, added))",
        new="    limits = problem.limits",
        effect=(
            "Where a backward adds memory, the V schedules offer plans that take more than the memory limit, or "
            "end with the error that nothing fits."
        ),
    ),
)
