"""A script's layout is chosen before its model is built, and does not change the losses of its training."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.layers import layers_of_layout
from tests.launcher.script_flags import CHUNKS, DRAWN, GO_ON, RECOMPUTED, UNCLIPPED, UNEVEN
from tests.launcher.script_trainings import MeasuredCosts, ScriptTrainings, Training

WHOLE = {"vocabulary_parallel": "off"}
"""Spread over the ranks, which may be chosen, a vocabulary gives other roundings."""
ODD = (*UNCLIPPED, "--num-layers", "7")
"""Layers that the ranks do not divide, which Megatron-LM takes only with a layout or a split of its own."""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> ScriptTrainings:
    """Trainings on two ranks."""
    in_a_v = {**WHOLE, "placement": "v"}
    table = {
        "seeded": Training({"schedule": "zb-h1", "seed_by_layer": True}, (*ODD, *UNEVEN, *DRAWN)),
        "seeded, in a V": Training({"schedule": "zb-v", "seed_by_layer": True}, (*ODD, *UNEVEN, *CHUNKS, *DRAWN)),
        "chosen": Training(WHOLE, (*ODD, *DRAWN)),
        "chosen, a V": Training(in_a_v, (*ODD, *DRAWN, *RECOMPUTED), saves=True, change=MeasuredCosts()),
        "chosen, a V, resumed": Training({}, (*ODD, *DRAWN, *RECOMPUTED, *GO_ON), loads="chosen, a V"),
        "base, uneven": Training(None, (*ODD, *UNEVEN)),
        "zb-v, uneven": Training({"schedule": "zb-v"}, (*ODD, *UNEVEN, *CHUNKS)),
    }
    return ScriptTrainings(2, table, tmp_path_factory.mktemp("layouts"))


def test_seeds_of_layers_draw_the_same_in_an_uneven_v(trainings: ScriptTrainings) -> None:
    ours, theirs = (trainings.numbers(training) for training in ("seeded, in a V", "seeded"))
    assert ours[0:8:2] + ours[8:] == theirs[0:8:2] + theirs[8:]
    assert len(set(ours)) == len(ours)


@pytest.mark.exhaustive  # tests/end_to_end/test_v_placement.py compares the numbers of uneven stages in a V
def test_an_uneven_v_gives_the_same_losses(trainings: ScriptTrainings) -> None:
    """The last rank logs the losses that the first computes; norms differ because they are summed in another order."""
    ours, theirs = (trainings.numbers(training) for training in ("zb-v, uneven", "base, uneven"))
    assert ours[0:8:2] + ours[8:] == theirs[0:8:2] + theirs[8:]
    assert [float.fromhex(x) for x in ours[1:8:2]] == pytest.approx([float.fromhex(x) for x in theirs[1:8:2]], rel=1e-6)


def test_costs_are_measured_before_the_script_builds_its_model(trainings: ScriptTrainings) -> None:
    """Every rank has the same costs, of the script's own layers; `test_the_layout_is_chosen` compares the numbers."""
    costs, others = (trainings.costs("chosen, a V", rank) for rank in range(2))
    assert costs == others
    assert len(costs["layers"]) == 7
    layer = costs["layers"][0]
    hidden, vocabulary, sequence = 32, 128, 16
    assert layer["state"] == 16 * (12 * hidden**2 + 13 * hidden), "fp32 with Adam: weight, gradient and two moments"
    assert costs["embedding"]["state"] == 16 * (vocabulary + sequence) * hidden
    assert costs["output"]["state"] == 16 * (vocabulary + 2) * hidden, "a copy of the table, and the final norm"
    assert layer["memory_w"] < 0 < layer["memory_r"] < layer["memory_f"]
    assert costs["time_comm"] > 0


@pytest.mark.parametrize("training", ["chosen", "chosen, a V"])
def test_the_layout_is_chosen_and_built_with_the_same_losses(trainings: ScriptTrainings, training: str) -> None:
    """Losses do not depend on the layout, because the choice gives every layer a seed of its own."""
    said = trainings.log(training, 0)
    assert re.search(r"^ > layout chosen .*2 ranks and 4 microbatches$", said, re.M)
    assert re.search(r"^     Megatron's split, 1f1b  ", said, re.M)
    [flags] = re.findall(r"^     the same layout in another run: (.*)$", said, re.M)
    layout, placement = re.findall(r"layout '?(\S+?)'? --zero-bubble-placement (\w+) --zero-bubble-seed", flags)[0]
    stages = layers_of_layout(layout, 2)
    places = Placement(placement, 2, len(stages) // 2)
    for rank in range(2):
        assert trainings.layers(training, rank) == [stages[stage] for stage in places.stages_of(rank)]
    assert training == "chosen" or placement == "v"
    assert trainings.losses(training) == trainings.losses("seeded")
    assert len(trainings.losses(training)) == 5


def test_a_job_keeps_the_layout_that_was_chosen_for_its_checkpoint(trainings: ScriptTrainings) -> None:
    resumed = "chosen, a V, resumed"
    assert " > layout: that of the checkpoint in --load" in trainings.log(resumed, 0)
    built = [trainings.layers(resumed, rank) for rank in range(2)]
    assert built == [trainings.layers("chosen, a V", rank) for rank in range(2)]
    assert list(map(len, built)) == [2, 2]
    assert sum(map(sum, built)) == 7
    assert len(trainings.numbers(resumed)) > 2
