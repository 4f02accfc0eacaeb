from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.formats import (
    Profile,
    costs_from_text,
    costs_to_json,
    profile_from_json,
    profile_to_json,
)
from megatron.zero_bubble.schedule.recomputation import Recompute

COSTS = StageCosts((1.5, 2.0), (1.25, 1 / 3), (0.5, 0.7), (0.1,), (1000.0, 1200.0), (-400.0, -500.0), (-600.0, -700.0))
PROFILE = Profile(Placement("linear", 2), COSTS, noise=0.0625, model={"num_layers": 8, "bf16": True, "name": "a"})


def document(**changes) -> str:
    return json.dumps({**json.loads(profile_to_json(PROFILE)), **changes})


def test_a_profile_survives_being_written():
    assert profile_from_json(profile_to_json(PROFILE)) == PROFILE


def test_a_profile_of_several_chunks_survives_being_written():
    profile = Profile(Placement("v", 2, 2), StageCosts.uniform(4), 0.0, {}, inside=(3.0, 0.0, 1.0, 9.0))
    assert profile_from_json(profile_to_json(profile)) == profile
    assert profile.inside_ranks == (9.0, 1.0)


def test_costs_are_read_from_a_profile_and_from_costs_alone():
    assert costs_from_text(profile_to_json(PROFILE)) == COSTS
    assert costs_from_text(costs_to_json(COSTS)) == COSTS


def test_the_order_of_the_keys_does_not_matter():
    assert costs_from_text(json.dumps(json.loads(profile_to_json(PROFILE)), sort_keys=True)) == COSTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (profile_to_json(PROFILE)[:-20], "not JSON: "),
        ("", "not JSON: "),
        ("[]", 'expected a JSON object with "format": "megatron-zero-bubble profile"'),
        (costs_to_json(COSTS), 'expected a JSON object with "format": "megatron-zero-bubble profile"'),
        (document(version=2), "version 2 of the format is unknown: this release reads versions 1 to 1"),
        (document(placement={"kind": "linear"}), "the megatron-zero-bubble profile is damaged: "),
        (document(placement={"kind": "ring", "num_ranks": 2}), "the megatron-zero-bubble profile is damaged: "),
        (
            document(placement={"kind": "linear", "num_ranks": 2.0, "num_chunks": 1}),
            "the megatron-zero-bubble profile is damaged: num_ranks must be a whole number, got 2.0",
        ),
        (document(noise="much"), "the megatron-zero-bubble profile is damaged: "),
        (document(noise=10**400), "not JSON: the integer 100000000000... has 401 digits, at most 60 are allowed"),
        (document(model=7), "the megatron-zero-bubble profile is damaged: "),
        (document(costs={}), "the megatron-zero-bubble profile is damaged: "),
        (document(inside=[1]), "the megatron-zero-bubble profile is damaged: inside must be 2 numbers of bytes"),
        (document(inside=[1, -1]), "the megatron-zero-bubble profile is damaged: inside must be 2 numbers of bytes"),
        (document(inside=3), "the megatron-zero-bubble profile is damaged: "),
        (document(messages={"time_comm": [1, 2, 3]}), "the megatron-zero-bubble profile is damaged: time_comm has 3"),
        (document(messages=[1]), "the megatron-zero-bubble profile is damaged: "),
        (document(placement={"kind": "linear", "num_ranks": 3}), "the profile has costs of 2 stages, its placement 3"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(text, message):
    with pytest.raises(ScheduleError, match=r"^[^\n]+$") as error:
        profile_from_json(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("missing", ["placement", "model", "noise", "costs"])
def test_a_missing_part_is_named(missing):
    parts = json.loads(document())
    del parts[missing]
    with pytest.raises(ScheduleError, match=missing):
        profile_from_json(json.dumps(parts))


def test_a_profile_fits_the_run_that_it_describes():
    PROFILE.check_fits(PROFILE.placement, PROFILE.model)
    PROFILE.check_fits(PROFILE.placement, {"bf16": True})  # what the run does not ask about may be anything


@pytest.mark.parametrize(
    ("placement", "model", "message"),
    [
        (Placement("linear", 4), {}, "num_ranks 2, this run has 4"),
        (Placement("v", 2, 2), {}, "kind linear, this run has v"),
        (Placement("interleaved", 2, 2), {}, "kind linear, this run has interleaved"),
        (Placement("linear", 2), {"num_layers": 16}, "num_layers 8, this run has 16"),
        (Placement("linear", 2), {"bf16": False}, "bf16 True, this run has False"),
        (Placement("linear", 2), {"hidden_size": 64}, "hidden_size None, this run has 64"),
    ],
)
def test_the_first_difference_is_named(placement, model, message):
    with pytest.raises(ScheduleError) as error:
        PROFILE.check_fits(placement, {**PROFILE.model, **model})
    assert str(error.value) == f"the profile was measured with {message}"


def test_the_number_of_chunks_counts():
    profile = Profile(Placement("interleaved", 2, 2), StageCosts.uniform(4), 0.0, {})
    with pytest.raises(ScheduleError, match="num_chunks 2, this run has 3"):
        profile.check_fits(Placement("interleaved", 2, 3), {})


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.PLANNED])
def test_a_run_that_recomputes_needs_a_profile_of_one(recompute):
    PROFILE.check_fits(PROFILE.placement, PROFILE.model)
    replace(PROFILE, costs=replace(COSTS, time_r=(1.0, 0.0))).check_fits(PROFILE.placement, PROFILE.model, recompute)
    with pytest.raises(ScheduleError, match="lacks the costs of recomputation"):
        PROFILE.check_fits(PROFILE.placement, PROFILE.model, recompute)
