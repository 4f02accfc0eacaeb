"""Plans large problems, each in a separate process, and measures processor time and memory of the planning."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

from megatron.zero_bubble.cli.output import percent, table
from megatron.zero_bubble.planner import generate, placement_for
from megatron.zero_bubble.schedule import StageCosts, lower, simulate, validate
from megatron.zero_bubble.schedule.default_costs import DEFAULT_SHARD, DROPPED
from megatron.zero_bubble.schedule.recomputation import Recompute

HEADS = ("schedule", "ranks", "microbatches", "with", "plan (s)", "simulate (s)", "prepare (s)", "GiB", "bubble")


@dataclass(frozen=True)
class LargeProblem:
    """A planning problem: the name of a schedule, and stages whose times differ from a mean by up to a tenth."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    memory_limit: float | None = None
    """Memory limit in p M_B; None for the default of the schedule."""
    plans_recomputation: bool = False
    has_vocabulary: bool = False
    num_chunks: int | None = None
    """Number of interleaved model chunks a rank; None for the default of the schedule."""

    @property
    def features(self) -> str:
        chunks = [] if self.num_chunks is None else [f"{self.num_chunks} chunks"]
        limit = [] if self.memory_limit is None else [f"{self.memory_limit:g} p M_B"]
        return ", ".join(
            [
                *chunks,
                *limit,
                *["planned recomputation"] * self.plans_recomputation,
                *["vocabulary"] * self.has_vocabulary,
            ]
        )

    def costs(self) -> StageCosts:
        placement = placement_for(self.schedule, self.num_ranks, self.num_chunks)
        size, generator = placement.num_stages, random.Random(1)
        times = tuple(generator.uniform(0.9, 1.1) for _ in range(size))
        held = 1 / placement.num_chunks
        costs = StageCosts(
            time_f=times,
            time_b=tuple(1.05 * time for time in times),
            time_w=tuple(0.8 * time for time in times),
            time_comm=(0.03,) * (size - 1),
            memory_f=(held,) * size,
            memory_b=(-held / 2,) * size,
            memory_w=(-held / 2,) * size,
        )
        if self.plans_recomputation:
            costs = replace(costs, time_r=times, memory_r=(DROPPED * held,) * size)
        return costs.with_shards(placement, DEFAULT_SHARD) if self.has_vocabulary else costs


PROBLEMS = (
    LargeProblem("zb-2p", 16, 1024),
    LargeProblem("zb-v", 16, 1024),
    LargeProblem("auto", 64, 512, 1),
    LargeProblem("auto", 64, 512, 1, plans_recomputation=True, has_vocabulary=True),
    LargeProblem("auto", 64, 512, 0.7, plans_recomputation=True, has_vocabulary=True),
    LargeProblem("zb-v", 64, 512, has_vocabulary=True),
    LargeProblem("auto", 64, 512, num_chunks=2),
    LargeProblem("auto", 128, 4096, 1),
    LargeProblem("zb-2p", 128, 4096),
    LargeProblem("zb-v", 128, 4096),
)


@dataclass(frozen=True)
class PlannedLarge:
    """The results for one problem: processor times in seconds, memory, and bubble rate."""

    problem: LargeProblem
    plan_seconds: float
    simulate_seconds: float
    prepare_seconds: float
    """Processor time of lowering and of the proof that the schedule runs on a GPU with one hardware queue."""
    peak_bytes: float
    """Peak memory of the process after planning and simulation."""
    bubble_rate: float


def planned(problem: LargeProblem) -> PlannedLarge:
    """Plan one problem in this process."""
    costs, clock = problem.costs(), time.process_time
    limit = None if problem.memory_limit is None else problem.memory_limit * problem.num_ranks
    begin = clock()
    schedule = generate(
        problem.schedule,
        problem.num_ranks,
        problem.num_microbatches,
        costs=costs,
        num_chunks=problem.num_chunks,
        memory_limit=limit,
        recompute=Recompute.PLANNED if problem.plans_recomputation else Recompute.NONE,
        vocabulary_parallel=problem.has_vocabulary,
    )
    planned_at = clock()
    bubble_rate = simulate(schedule, costs).bubble_rate
    simulated_at = clock()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    validate(lower(schedule, costs=costs))
    return PlannedLarge(
        problem, planned_at - begin, simulated_at - planned_at, clock() - simulated_at, peak, bubble_rate
    )


def planned_at_scale(
    problems: Sequence[LargeProblem], *, markdown: bool = False
) -> tuple[list[dict[str, object]], str]:
    """Plan all problems; return the results as JSON and as a table."""
    found = []
    for problem in problems:
        with get_context("spawn").Pool(1) as process:
            found.append(process.apply(planned, (problem,)))
        print(f"{problem.schedule}, {problem.num_ranks} x {problem.num_microbatches}: planned", file=sys.stderr)
    rows = [
        (
            *(
                one.problem.schedule,
                str(one.problem.num_ranks),
                str(one.problem.num_microbatches),
                one.problem.features,
            ),
            *(f"{seconds:.2f}" for seconds in (one.plan_seconds, one.simulate_seconds, one.prepare_seconds)),
            *(f"{one.peak_bytes / 2**30:.2f}", percent(one.bubble_rate)),
        )
        for one in found
    ]
    return [asdict(one) for one in found], table(HEADS, rows, markdown=markdown)
