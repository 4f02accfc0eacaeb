"""Plan random problems, and compare the plans with the lower bound and with the named schedules.

    python -m benchmarks.planning                                       200 problems of every placement
    python -m benchmarks.planning --placement interleaved --problems 20
    python -m benchmarks.planning --scale                               large problems, with the time that each takes
    python -m benchmarks.planning --scale --schedule zb-h1 --size 32x256

`--scale` plans the problems of `benchmarks.planning_at_scale` instead, or the schedules of --schedule, and measures
processor time and memory.

A problem has 2 to 16 ranks and up to four microbatches a rank. The costs of the stages are equal, equal except for the
last stage, or all different. The memory limit is between the smallest possible limit and 3p M_B, where M_B is the
activation memory of one microbatch on the rank with the largest activations. A problem is determined by its number. The
time of a plan is the longest span of any rank. With interleaved chunks, whose iterations do not interlock, the time is
the makespan. The exit status is 1 if a plan is worse than a named schedule that fits in the memory limit of the plan.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import median, quantiles
from typing import get_args

from benchmarks.planning_at_scale import PROBLEMS, LargeProblem, planned_at_scale
from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.cli.output import percent, table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.portfolio import fits
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts, simulate
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.session.flag_parser import flag

RANGES = ((0.0, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 3.0))
"""(smallest, largest) memory limit of each row of the table, in p M_B."""
HEADS = ("placement", "limit (p M_B)", "problems", "median", "nine tenths", "most", "beside the best named", "worse")
_SIZES = ((8, 64), (16, 128), (32, 256), (64, 512))


def _size(word: str) -> tuple[int, int]:
    ranks, _, microbatches = word.partition("x")
    if not (ranks.isdigit() and microbatches.isdigit()):
        raise argparse.ArgumentTypeError(f"expected ranks x microbatches, as in 32x256, got {word!r}")
    return int(ranks), int(microbatches)


@dataclass(frozen=True)
class PlanningFlags(TableFlags):
    """the problems"""

    placement: list[PlacementKind] | None = flag(
        "placement to plan for; repeat for more (default: all)",
        None,
        action="append",
        parse=str,
        choices=get_args(PlacementKind),
    )
    problems: int = flag("problems of each placement", 200, parse=at_least(1), metavar="N")
    scale: bool = flag("plan large problems, and measure the time and memory that planning takes", False)
    schedule: list[str] | None = flag(
        "with --scale: schedule to plan, in place of large problems; repeat for more", action="append", metavar="NAME"
    )
    size: list[tuple[int, int]] | None = flag(
        "with --schedule: ranks x microbatches; repeat for more (default: 8x64, 16x128, 32x256, 64x512)",
        action="append",
        parse=_size,
        metavar="PxM",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule is not None and not self.scale:
            raise ValueError("argument --schedule: needs --scale")
        if self.size is not None and self.schedule is None:
            raise ValueError("argument --size: needs --schedule")

    @property
    def large_problems(self) -> Sequence[LargeProblem]:
        """The problems of --scale."""
        sizes = self.size or _SIZES
        return [LargeProblem(name, *size) for name in self.schedule or () for size in sizes] or PROBLEMS


@dataclass(frozen=True)
class PlannedProblem:
    """The results for one problem."""

    kind: PlacementKind
    number: int
    limit: float
    """In p M_B."""
    above_bound: float
    """Time of the plan divided by the lower bound, minus 1."""
    beside_named: float | None
    """Time of the plan divided by the time of the best named schedule that fits, minus 1; None if none fits."""


def random_problem(kind: PlacementKind, number: int) -> tuple[Problem, float]:
    """Return the problem with the given number, and its memory limit in p M_B."""
    generator = random.Random(f"{kind} {number}")
    num_ranks = generator.randint(2, 16)
    num_chunks = {"linear": 1, "v": 2, "interleaved": generator.randint(2, 4)}[kind]
    placement = Placement(kind, num_ranks, num_chunks)
    # Half of the numbers of microbatches are multiples of the ranks, as the named interleaved schedules need.
    fewest, step = generator.choice(((num_ranks, num_ranks), (num_ranks // 2 + 1, 1)))
    num_microbatches = generator.randrange(fewest, 4 * num_ranks + 1, step)
    costs = _costs(generator, placement)
    fullest = max(sum(costs.memory_f[stage] for stage in placement.stages_of(rank)) for rank in range(num_ranks))
    multiple = generator.uniform(1, 3 * num_ranks)
    limits = (multiple * fullest,) * num_ranks
    problem = Problem(placement, num_microbatches, costs, limits, takes_makespan=kind == "interleaved")
    return problem, multiple / num_ranks


def _costs(generator: random.Random, placement: Placement) -> StageCosts:
    size = placement.num_stages
    b, w = generator.uniform(0.8, 1.4), generator.uniform(0.5, 1.1)
    layers, memory = [1.0] * size, [1.0] * size
    style = generator.choice(("equal", "last", "unequal"))
    if style == "last":
        layers[-1] += generator.uniform(0.2, 2)
    elif style == "unequal":
        layers, memory = ([generator.uniform(0.5, 2) for _ in range(size)] for _ in range(2))
    share, message = generator.uniform(0.2, 0.8), generator.choice((0, 0.05, 0.3))
    return StageCosts(
        time_f=tuple(layers),
        time_b=tuple(b * layer for layer in layers),
        time_w=tuple(w * layer for layer in layers),
        time_comm=(message,) * (size - 1),
        memory_f=tuple(memory),
        memory_b=tuple(-share * held for held in memory),
        memory_w=tuple((share - 1) * held for held in memory),
    )


def planned_problem(kind: PlacementKind, number: int) -> PlannedProblem:
    """Plan one problem, and compare the plan with the lower bound and with the named schedules that fit."""
    problem, limit = random_problem(kind, number)
    planned = _time(problem, "auto", problem.limits)
    names = [name for name, one in ENTRIES.items() if one.placement == kind and one.has_own_limit and not one.is_slow]
    named = min(_time(problem, name) for name in names)
    beside = None if named == inf else planned / named - 1
    return PlannedProblem(kind, number, limit, planned / problem.bound - 1, beside)


def _time(problem: Problem, name: str, limits: Sequence[float] | None = None) -> float:
    """Time of the schedule `name`; infinity if there is no such schedule or it exceeds a memory limit."""
    placement = problem.placement
    try:
        schedule = generate(
            name,
            placement.num_ranks,
            problem.num_microbatches,
            costs=problem.costs,
            num_chunks=placement.num_chunks,
            placement_kind=placement.kind,
            memory_limit=limits,
        )
    except ScheduleError:  # an interleaved schedule with a number of microbatches that megatron-core refuses
        return inf
    timeline = simulate(schedule, problem.costs)
    return problem.judged(timeline.cost, timeline.makespan)[0] if fits(schedule, problem) else inf


def _row(kind: str, limits: str, found: Sequence[PlannedProblem]) -> tuple[str, ...]:
    distances = [one.above_bound for one in found]
    beside = [one.beside_named for one in found if one.beside_named is not None]
    nine_tenths = quantiles(distances, n=10, method="inclusive")[-1] if len(distances) > 1 else distances[0]
    return (
        *(kind, limits, str(len(found))),
        *map(percent, (median(distances), nine_tenths, max(distances))),
        f"{median(beside):+.1%} of {len(beside)}" if beside else "-",
        str(sum(one > 1e-9 for one in beside)),
    )


@command("benchmarks.planning", PlanningFlags, __doc__)
def main(flags: PlanningFlags) -> bool:
    """Plan all problems, print the table, and return whether every plan is as good as all named schedules."""
    if flags.scale:
        flags.deliver(*planned_at_scale(flags.large_problems, markdown=flags.markdown))
        return True
    found, rows = [], []
    for kind in flags.placement or get_args(PlacementKind):
        own = [planned_problem(kind, number) for number in range(flags.problems)]
        for low, high in RANGES:
            inside = [one for one in own if low <= one.limit < high]
            if inside:
                rows.append(_row(kind, f"{low:g} to {high:g}", inside))
        rows.append(_row(kind, "all", own))
        found += own
        print(f"{kind}: {len(own)} problems planned", file=sys.stderr)
    flags.deliver([asdict(one) for one in found], table(HEADS, rows, markdown=flags.markdown))
    return not any(one.beside_named is not None and one.beside_named > 1e-9 for one in found)


if __name__ == "__main__":
    sys.exit(main())
