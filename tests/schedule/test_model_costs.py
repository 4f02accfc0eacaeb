"""Costs of stages from those of a model's units."""

from dataclasses import replace
from operator import sub

import pytest

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.graph import collective_time
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts, spread_layers

LAYER = UnitCosts(1, 2, 3, memory_f=4, memory_b=-1, memory_w=-3, time_r=1, memory_r=2, state=10)
MODEL = ModelCosts(UnitCosts(0, 0, 0.5, state=100), (LAYER,) * 6, UnitCosts(5, 6, 7, memory_f=8, state=200), 0.25)


def test_a_stage_costs_what_its_units_cost() -> None:
    costs = MODEL.of_stages((3, 2, 1), Placement("linear", 3))
    assert costs.time_f == (3, 2, 6)
    assert costs.time_b == (6, 4, 8)
    assert costs.time_w == (9.5, 6, 10)
    assert costs.memory_f == (12, 8, 12)
    assert costs.memory_r == (6, 4, 2)
    assert costs.time_comm == (0.25, 0.25)


def test_states_of_a_rank_are_those_of_all_its_stages() -> None:
    assert MODEL.states((3, 1, 1, 1), Placement("v", 2, 2)) == (130 + 210, 20)


def test_no_message_is_sent_where_a_v_turns() -> None:
    assert MODEL.of_stages((2, 1, 1, 2), Placement("v", 2, 2)).time_comm == (0.25, 0, 0.25)


def test_the_embedding_may_have_a_stage_to_itself() -> None:
    assert MODEL.of_stages((0, 3, 3), Placement("linear", 3)).time_f[0] > 0


@pytest.mark.parametrize(
    ("partition", "reason"),
    [((3, 3), "2 stages"), ((3, 2, 2), "7 layers"), ((3, 0, 3), "without a layer"), ((4, 3, -1), "without a layer")],
)
def test_what_does_not_fit_is_refused(partition: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        MODEL.of_stages(partition, Placement("linear", 3))


def test_layers_are_spread_evenly_the_ends_getting_fewer() -> None:
    assert spread_layers(6, 3) == (2, 2, 2)
    assert spread_layers(7, 3) == (2, 3, 2)
    with pytest.raises(ScheduleError, match="2 layers are not enough for 3 stages"):
        spread_layers(2, 3)


def test_spread_over_the_ranks_embedding_and_output_cost_the_same_on_all() -> None:
    placement = Placement("v", 2, 2)
    sharded = MODEL.vocabulary_parallel(2)
    costs = sharded.of_stages((1, 2, 2, 1), placement)
    assert costs.time_f == (1, 2, 2, 1)
    assert costs.time_e == (0, 0, 0, 0)
    assert costs.time_ew == (0.25, 0.25, 0, 0)
    assert costs.time_s == (5.5, 5.5, 0, 0)
    assert costs.time_t == (3.5, 3.5, 0, 0)
    assert costs.memory_s == (4, 4, 0, 0)
    assert costs.memory_t == (-4, -4, 0, 0)
    whole = MODEL.of_stages((1, 2, 2, 1), placement)
    assert sum(map(costs.work, range(4))) == sum(map(whole.work, range(4)))
    assert sharded.states((1, 2, 2, 1), placement) == (20 + 150, 40 + 150)
    with pytest.raises(ScheduleError, match="without a layer"):
        sharded.of_stages((0, 2, 3, 1), placement)


@pytest.mark.parametrize("placement", [Placement("linear", 4), Placement("v", 2, 2), Placement("interleaved", 2, 2)])
def test_costs_with_shards_say_what_stages_cost_without(placement: Placement) -> None:
    """S takes the time of the output's F and B, which have as large a product, and T that of its W."""
    model = replace(MODEL, output=replace(MODEL.output, time_f=5.5, time_b=5.5, memory_w=-8))
    spread = model.vocabulary_parallel(placement.num_ranks).of_stages((1, 2, 2, 1), placement)
    assert spread.with_whole_vocabulary() == model.of_stages((1, 2, 2, 1), placement)


def test_a_tied_weight_is_kept_once_if_it_is_spread() -> None:
    tied = replace(MODEL, ties_output=True)
    assert tied.states((3, 3), Placement("linear", 2)) == (130, 230)
    assert tied.vocabulary_parallel(2).states((3, 3), Placement("linear", 2)) == (80, 80)


def test_messages_take_time_from_the_stages_at_both_ends() -> None:
    """Half of an exchange for a message: stages in the middle send one and receive one."""
    placement = Placement("v", 2, 2)
    without = MODEL.of_stages((1, 2, 2, 1), placement)
    costs = replace(MODEL, time_exchange=0.4).of_stages((1, 2, 2, 1), placement)
    for name in ("time_f", "time_b"):
        added = map(sub, getattr(costs, name), getattr(without, name))
        assert list(added) == pytest.approx([0.2, 0.2, 0.2, 0.2]), "stages 1 and 2 are on one rank"
    assert costs.time_w == without.time_w


def test_collectives_take_time_from_the_operations_on_shards() -> None:
    without, costs = (model.vocabulary_parallel(2).shard for model in (MODEL, replace(MODEL, time_collective=1)))
    assert without is not None
    assert costs is not None
    added = {name: costs[name] - without[name] for name in costs if name.startswith("time")}
    assert added == pytest.approx({"time_e": 1.5, "time_s": 2, "time_t": 0.5, "time_ew": 1})


def test_stages_exchange_what_their_layers_exchange():
    experts = replace(LAYER, all_to_all_f=0.25, all_to_all_b=0.5)
    model = replace(MODEL, layers=(LAYER, LAYER, *[experts] * 4))
    costs = model.of_stages((3, 3), Placement("linear", 2))
    assert (costs.all_to_all_f, costs.all_to_all_b) == ((0.25, 0.75), (0.5, 1.5))
    assert model.has_all_to_all
    assert not model.computing.has_all_to_all
    assert model.computing.layers[-1].time_b == LAYER.time_b - 0.5


@pytest.mark.parametrize(("latency", "expected"), [(0, 3), (7, 7)])
def test_a_collective_takes_its_measured_time_or_that_of_a_message(latency, expected):
    costs = replace(MODEL, time_comm=3, latency_collective=latency).vocabulary_parallel(2)
    assert collective_time(costs.of_stages((3, 3), Placement("linear", 2))) == expected
