"""Choose layouts for random models, and compare each layout with the best layout of any fixed choice.

    python -m benchmarks.random_models --models 200
    python -m benchmarks.random_models --first-seed 8000 --models 20 --operations 20000

A model has 2 to 16 ranks, and up to six layers and four microbatches a rank. The output layer takes the time of 0.1 to
8 layers, and may be tied to the embedding. Optimizer states are light or heavy. In one of four models, every second
layer is twice as expensive. The memory limit is 1 to 2 times the memory of 1F1B with Megatron's split. A model is
determined by its seed. A fixed choice consists of a placement with a number of chunks, a kind of recomputation or none,
and a whole or a spread vocabulary. The search of a fixed choice does not prefer Megatron's split. A fixed choice is
searched with full effort only if a search without effort comes within a tenth of the chosen layout.

The exit status is 1 if a model is refused although a fixed choice fits, or if 1F1B with Megatron's split is faster than
a chosen layout.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil

from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.cli.output import percent, table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.planner import Plan, PlanRequest, all_placements, search_layouts
from megatron.zero_bubble.planner.megatrons_split import as_megatron_runs, capacity_of_multiple, megatrons_layout
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.flag_parser import flag

RECOMPUTES = (Recompute.NONE, Recompute.PLANNED)
WORTH_EFFORT = 1.1
HEADS = ("models", "at most 1.00", "at most 1.03", "at most 1.05", "largest", "refused", "beside 1F1B: least", "median")


@dataclass(frozen=True)
class RandomModelFlags(TableFlags):
    """the models"""

    first_seed: int = flag("seed of the first model", 7000, parse=at_least(0), metavar="N")
    models: int = flag("number of models", 200, parse=at_least(1), metavar="N")
    operations: int = flag(
        "only models whose layers times microbatches are at most this many", 1_000_000, parse=at_least(10), metavar="N"
    )


@dataclass(frozen=True)
class ComparedLayout:
    """The chosen layout of one model, compared with the best layout of any fixed choice."""

    seed: int
    num_ranks: int
    num_microbatches: int
    num_layers: int
    limit: float
    """Memory limit in multiples of the memory of 1F1B with Megatron's split."""
    chosen: str
    best: str
    above_best: float | None
    """Time of the chosen layout divided by the time of the best fixed choice, at least 1; None if no layout was
    chosen."""
    beside_1f1b: float | None
    """Time of 1F1B with Megatron's split, divided by the time of the chosen layout."""
    seconds: float
    """Processor time of the search, in seconds."""


def random_request(seed: int, most_operations: int = 1_000_000) -> tuple[PlanRequest, float]:
    """Return the request for the model with the given seed, and its memory limit in multiples of 1F1B's memory."""
    generator, num_operations = random.Random(seed), most_operations + 1
    while num_operations > most_operations:
        num_ranks = generator.randint(2, 16)
        num_layers = num_ranks * generator.randint(1, 6) + generator.choice((0, 0, generator.randrange(num_ranks)))
        num_microbatches = generator.randint(ceil(num_ranks / 2), 4 * num_ranks)
        num_operations = num_layers * num_microbatches
    model = _random_model(generator, num_layers)
    usual = megatrons_layout(num_layers, num_ranks)
    request = PlanRequest(
        "auto",
        num_microbatches,
        all_placements(num_ranks),
        model,
        usual=usual,
        recomputes=RECOMPUTES,
        vocabulary_parallel=None,
        takes_makespan=True,
    )
    limit = generator.choice((1.0, generator.uniform(1, 2)))
    return replace(request, capacity=capacity_of_multiple(request, usual, limit)), limit


def _random_model(generator: random.Random, num_layers: int) -> ModelCosts:
    share, state = generator.uniform(0.2, 0.8), generator.choice((0, 0.5, 3, 20))
    layer = UnitCosts(
        *(10.0, 10 * generator.uniform(0.8, 1.3), 10 * generator.uniform(0.5, 1)),
        *(1.0, -share, share - 1),
        *(10 * generator.uniform(0.9, 1), generator.uniform(0.6, 0.95), 1, state),
    )
    larger = replace(UnitCosts(*(2 * value for value in asdict(layer).values())), num_blocks=1)
    second = generator.choice((layer, layer, layer, larger))
    head, kept = generator.uniform(0.1, 8), generator.choice((0.1, 0.5, 1.5))
    embedding = UnitCosts(0.2, 0, 0.3 * min(head, 2), 0.02, 0, -0.02, state=state * head / 2)
    output = UnitCosts(*(10 * head,) * 3, kept, -0.3 * kept, -0.7 * kept, state=state * head / 2)
    layers = tuple((layer, second)[number % 2] for number in range(num_layers))
    ties_output = generator.random() < 0.5
    return ModelCosts(embedding, layers, output, generator.choice((0, 0.5, 3)), ties_output)


def chosen_layout(seed: int, most_operations: int = 1_000_000) -> ComparedLayout:
    """Choose the layout of one model, and compare the layout with all fixed choices."""
    request, limit = random_request(seed, most_operations)
    begin = time.process_time()
    chosen = _searched(request)
    seconds = time.process_time() - begin
    fixed = min(_fixed_choices(request, chosen), key=lambda plan: plan.time, default=chosen)
    assert request.usual is not None
    own = as_megatron_runs(request, request.usual)
    return ComparedLayout(
        seed=seed,
        num_ranks=request.num_ranks,
        num_microbatches=request.num_microbatches,
        num_layers=len(request.model.layers),
        limit=limit,
        chosen=words_of(chosen),
        best=words_of(fixed),
        above_best=max(1.0, chosen.time / fixed.time) if chosen and fixed else None,
        beside_1f1b=own.time / chosen.time if chosen else None,
        seconds=seconds,
    )


def _searched(request: PlanRequest) -> Plan | None:
    try:
        return search_layouts(request)
    except ScheduleError:
        return None


def _fixed_choices(request: PlanRequest, chosen: Plan | None) -> Iterator[Plan]:
    """Yield plans for the fixed choices that fit in the memory and whose time is near the time of the chosen layout."""
    for placement, recompute, shards in product(request.placements, RECOMPUTES, (False, True)):
        fixed = replace(
            request, usual=None, placements=(placement,), recomputes=(recompute,), vocabulary_parallel=shards
        )
        quick = _searched(replace(fixed, effort=0))
        if quick and (chosen is None or quick.time < WORTH_EFFORT * chosen.time):
            yield _searched(fixed) or quick


def words_of(plan: Plan | None) -> str:
    """The plan's layout in a few words, such as `v 2, planned, shards`."""
    if plan is None:
        return "-"
    layout = plan.layout
    placement, shards = layout.placement, ", shards" * layout.vocabulary_parallel
    return f"{placement.kind} {placement.num_chunks}, {layout.recompute.value}{shards}"


def _row(found: Sequence[ComparedLayout]) -> tuple[str, ...]:
    above = [one.above_best for one in found if one.above_best is not None]
    gains = sorted(one.beside_1f1b for one in found if one.beside_1f1b is not None)
    refused = sum(one.chosen == "-" != one.best for one in found)
    shares = (percent(sum(ratio <= most + 5e-4 for ratio in above) / len(found)) for most in (1, 1.03, 1.05))
    ends = (f"{gains[0]:.3f}", f"{gains[len(gains) // 2]:.3f}") if gains else ("-", "-")
    return str(len(found)), *shares, f"{max(above, default=1):.3f}", str(refused), *ends


@command("benchmarks.random_models", RandomModelFlags, __doc__)
def main(flags: RandomModelFlags) -> bool:
    """Choose layouts for the random models, print the table, and return whether the exit status is 0."""
    found = []
    for seed in range(flags.first_seed, flags.first_seed + flags.models):
        found.append(chosen_layout(seed, flags.operations))
        print(found[-1], file=sys.stderr)
    flags.deliver([asdict(one) for one in found], table(HEADS, [_row(found)], markdown=flags.markdown))
    return not any(one.chosen == "-" != one.best or (one.beside_1f1b or 1) < 1 - 1e-9 for one in found)


if __name__ == "__main__":
    sys.exit(main())
