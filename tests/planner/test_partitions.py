"""Partitions whose busiest rank ends early."""

from itertools import product
from random import Random

import pytest

from megatron.zero_bubble.planner.balance import Balance
from megatron.zero_bubble.planner.partitions import balanced_partition, neighbours
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute

LAYER = UnitCosts(1, 1, 0.8)
EMBEDDING = UnitCosts(0.02, 0, 0.01)
PLACEMENTS = (Placement("linear", 3), Placement("v", 2, 2), Placement("interleaved", 2, 2))


def model(num_layers: int, head: float) -> ModelCosts:
    return ModelCosts(EMBEDDING, (LAYER,) * num_layers, UnitCosts(head, head, head), 0.05)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.kind)
@pytest.mark.parametrize("head", [0.1, 2, 5.7])
def test_no_partition_ends_much_earlier_than_the_balanced_one(placement: Placement, head: float) -> None:
    balance = Balance(model(9, head), placement, 16)
    found = balanced_partition(balance)
    assert found is not None
    several = (part for part in product(range(10), repeat=placement.num_stages) if sum(part) == 9 and all(part[1:-1]))
    assert balance.estimate(found) <= 1.01 * min(map(balance.estimate, several))


@pytest.mark.parametrize(("p", "m", "num_layers", "expected"), [(2, 16, 15, (6, 9)), (2, 8, 16, (7, 9))])
def test_the_last_stage_gets_more_layers_because_it_recomputes_none(
    p: int, m: int, num_layers: int, expected: tuple[int, ...]
) -> None:
    """Under full recomputation the last stage runs each B directly after its F."""
    layer = UnitCosts(10, 10, 10, memory_f=1, memory_b=-0.5, memory_w=-0.5, time_r=10, memory_r=0.9)
    end = UnitCosts(0.1, 0.1, 0.1)
    costs = ModelCosts(end, (layer,) * num_layers, end)
    assert balanced_partition(Balance(costs, Placement("linear", p), m, Recompute.FULL)) == expected


def test_a_heavy_output_gets_fewer_layers() -> None:
    assert balanced_partition(Balance(model(32, 2), Placement("linear", 8), 32)) == (5, 5, 4, 4, 4, 4, 4, 2)


def test_expensive_layers_are_spread_by_their_time() -> None:
    experts = UnitCosts(3, 3, 2.4)
    uneven = ModelCosts(EMBEDDING, (LAYER,) * 6 + (experts,) * 2, UnitCosts(0.1, 0.1, 0.1))
    assert balanced_partition(Balance(uneven, Placement("linear", 2), 8)) == (6, 2)


@pytest.mark.parametrize(("num_ranks", "num_layers", "times"), [(4, 12, 4), (3, 8, 8)])
def test_an_expensive_last_layer_leaves_the_other_layers_to_other_ranks(
    num_ranks: int, num_layers: int, times: float
) -> None:
    """With moves from equal numbers of layers alone, the busiest rank ends 1.37 to 1.39 times as late."""
    one, last, output = (UnitCosts(time, time, time, 1, -0.5, -0.5) for time in (1, times, 3))
    costs = ModelCosts(UnitCosts(0, 0, 0), (one,) * (num_layers - 1) + (last,), output)
    balance = Balance(costs, Placement("linear", num_ranks), 16)
    found = balanced_partition(balance)
    assert found is not None
    counts = product(range(num_layers + 1), repeat=num_ranks)
    several = (part for part in counts if sum(part) == num_layers and all(part[1:-1]))
    assert balance.estimate(found) <= 1.1 * min(map(balance.estimate, several))


def test_where_states_do_not_fit_layers_leave_the_full_rank_and_not_the_slowest() -> None:
    layer = UnitCosts(1, 1, 0.8, state=1)
    costs = ModelCosts(UnitCosts(0, 0, 0, state=3), (layer,) * 8, UnitCosts(5, 5, 5))
    linear = Placement("linear", 2)
    assert balanced_partition(Balance(costs, linear, 8)) == (7, 1)
    assert balanced_partition(Balance(costs, linear, 8, capacity=6)) == (3, 5)


def test_stages_of_a_rank_are_not_lopsided_where_ranks_are_even() -> None:
    found = balanced_partition(Balance(model(24, 0.01), Placement("v", 4, 2), 16))
    assert found == (3,) * 8


def test_fewer_layers_than_inner_stages_cannot_be_spread() -> None:
    assert balanced_partition(Balance(model(2, 1), Placement("linear", 5), 8)) is None


def test_neighbours_are_as_promising_as_asked_and_the_best_comes_first() -> None:
    balance = Balance(model(32, 2), Placement("linear", 8), 32)
    best = balanced_partition(balance)
    assert best is not None
    longest = 1.02 * balance.estimate(best)
    found = neighbours(balance, best, longest)
    assert found
    assert all(balance.estimate(each) <= longest for each in found)
    assert found == sorted(found, key=balance.order)
    assert {sum(each) for each in found} == {32}


def test_where_activations_exceed_a_limit_layers_leave_the_full_rank() -> None:
    first, layer = (UnitCosts(1, 1, 1, memory, 0, -memory) for memory in (5, 1))
    costs, linear = ModelCosts(UnitCosts(0, 0, 0), (first, *[layer] * 5), UnitCosts(0, 0, 0)), Placement("linear", 2)
    assert balanced_partition(Balance(costs, linear, 8)) == (3, 3)
    assert balanced_partition(Balance(costs, linear, 8, limits=(6, 6))) == (2, 4)
    assert balanced_partition(Balance(costs, linear, 8, limits=(7 - 1e-12, 3))) == (3, 3)


@pytest.mark.parametrize("seed", range(24))
def test_a_partition_is_found_where_one_fits_barely(seed: int) -> None:
    """The best of all partitions of a random model has 2% of its fullest rank to spare."""
    generator = Random(seed)
    placement = PLACEMENTS[seed % 3]
    num_layers = placement.num_stages + 4

    def unit() -> UnitCosts:
        time, memory, state = (generator.uniform(*limits) for limits in ((0.3, 2), (1, 6), (0, 20)))
        return UnitCosts(time, time, time, memory, -memory / 2, -memory / 2, state=state)

    costs = ModelCosts(unit(), tuple(unit() for _ in range(num_layers)), unit())
    counts = product(range(num_layers + 1), repeat=placement.num_stages)
    several = [part for part in counts if sum(part) == num_layers and all(part[1:-1])]
    least = min(max(placement.sums(needed(costs, part))) for part in several)
    balance = Balance(costs, placement, 8, capacity=1.02 * least)
    found = balanced_partition(balance)
    assert found is not None
    assert balance.excess(found) == 0
    assert balance.time(found) <= 1.05 * min(balance.time(part) for part in several if balance.excess(part) == 0)


def needed(costs: ModelCosts, partition: tuple[int, ...]) -> list[float]:
    """Stage -> memory of its states and of one microbatch."""
    units = iter(costs.layers)
    stages = [[next(units) for _ in range(number)] for number in partition]
    stages[0].append(costs.embedding)
    stages[-1].append(costs.output)
    return [sum(unit.state + unit.memory_f for unit in stage) for stage in stages]
