"""Costs of stages from those of a model's units."""

import pytest

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts, even_partition

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


def test_megatron_splits_evenly_or_not_at_all() -> None:
    assert even_partition(6, 3) == (2, 2, 2)
    with pytest.raises(ScheduleError, match="7 layers do not divide into 3 stages"):
        even_partition(7, 3)
