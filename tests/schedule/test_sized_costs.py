"""Costs of microbatches follow from their sizes."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.schedule import StageCosts
from megatron.zero_bubble.schedule.sized_costs import Curve, MicrobatchSize, SizedCosts


def test_a_size_is_counted_from_the_lengths_of_sequences():
    assert MicrobatchSize.of([3, 4]) == (7, 25)
    assert MicrobatchSize.of([]) == (0, 0)


def test_a_curve_has_a_part_for_tokens_and_one_for_attention():
    assert Curve(1.0, 2.0, 0.5).at(MicrobatchSize(7, 25)) == 1 + 14 + 12.5


def test_costs_without_curves_are_the_usual_ones():
    usual = StageCosts.uniform(2, time_comm=0.25)
    costs = SizedCosts(usual, {"time_f": (Curve(0.0, 1.0, 0.0), Curve(0.0, 2.0, 0.0))}).of(MicrobatchSize(5, 25))
    assert costs.time_f == (5, 10)
    assert (costs.time_b, costs.time_comm) == (usual.time_b, usual.time_comm)


def test_an_empty_microbatch_takes_some_time():
    """Times are above zero, as `StageCosts` asks for."""
    costs = SizedCosts(StageCosts.uniform(1), {"time_f": (Curve(0.0, 1.0, 0.0),)}).of(MicrobatchSize(0, 0))
    assert 0 < costs.time_f[0] < 1e-9


def test_exchanges_between_experts_take_the_usual_part_of_their_operations():
    """A microbatch of a tenth of the usual size exchanges fewer tokens; the time of F contains the exchange."""
    usual = StageCosts.uniform(1, all_to_all_f=0.3)
    costs = SizedCosts(usual, {"time_f": (Curve(0.0, 0.01, 0.0),)}).of(MicrobatchSize(10, 100))
    assert costs.time_f == (0.1,)
    assert costs.all_to_all_f == pytest.approx((0.03,))


def test_an_empty_microbatch_may_have_fused_backwards():
    usual, flat = StageCosts.uniform(1, saved_bw=0.2), (Curve(-1.0, 0.01, 0.0),)
    costs = SizedCosts(usual, dict.fromkeys(("time_f", "time_b", "time_w"), flat)).of(MicrobatchSize(0, 0))
    assert 0 < costs.saved_bw[0] < costs.time_w[0]
