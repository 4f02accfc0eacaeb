"""Layers over stages that do not divide their number, and stages in which embedding and loss count as a layer."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble.session.layers import layers_of_layout, spread_layers, to_layout
from tests.checked_flags import checked
from tests.launch import TINY_GPT
from tests.trainings import Trainings

EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "layers"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (9, 4, [2, 3, 2, 2]),
        (11, 4, [3, 3, 3, 2]),
        (7, 4, [2, 2, 2, 1]),
        (5, 2, [3, 2]),
        (3, 3, [1, 1, 1]),
        (6, 1, [6]),
    ],
)
def test_layers_are_spread_evenly_and_the_ends_get_the_fewer(num_layers, num_stages, layers):
    assert spread_layers(num_layers, num_stages) == tuple(layers)


@pytest.mark.parametrize("num_layers", range(6, 30))
def test_no_layer_is_lost_and_stages_differ_by_one_at_most(num_layers):
    layers = spread_layers(num_layers, 6)
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) <= 1
    assert layers[-1] == min(layers)


@pytest.mark.parametrize(("pattern", "flag"), [(None, "--num-layers 3"), ("*-*", "--hybrid-layer-pattern *-*")])
def test_a_stage_without_a_layer_is_refused(pattern, flag):
    with pytest.raises(
        ValueError, match=rf"^{re.escape(flag)}: 3 layers are not enough for 4 stages .* fewer pipeline"
    ):
        spread_layers(3, 4, pattern)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_megatron_core_reads_the_layout_as_it_was_meant(num_ranks):
    layers = (2, 3, 3, 2)
    assert layers_of_layout(to_layout(layers), num_ranks) == layers


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, None),
        ({"--num-layers": "10"}, "Et*2|t*3|t*3|t*2L"),
        ({"--num-layers": "10", "--zero-bubble": None, "--zero-bubble-keep-layout": None}, "Et*2|t*3|t*3|t*2L"),
        ({"--num-layers": "9", "--num-virtual-stages-per-pipeline-rank": "2"}, "Et*1|t*2|t*1|t*1|t*1|t*1|t*1|t*1L"),
        ({"--num-layers": "7", "--num-layers-per-virtual-pipeline-stage": "2"}, "Et*2|t*2|t*2|t*1L"),
    ],
)
def test_what_the_flag_makes_of_other_flags(changes, layout):
    changes = {"--global-batch-size": "16", **changes, "--allow-padding-num-layers": None}
    assert checked(changes).pipeline_model_parallel_layout == layout


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"--num-layers": "10", EMBEDDING: None, LOSS: None}, "Et*2|t*3|t*3|t*2L"),
        ({"--num-layers": "11", EMBEDDING: None}, "Et*2|t*3|t*3|t*3L"),
        ({"--num-layers": "11", LOSS: None}, "Et*3|t*3|t*3|t*2L"),
        ({"--num-layers": "6", "--num-virtual-stages-per-pipeline-rank": "2", EMBEDDING: None, LOSS: None},
         "E|t*1|t*1|t*1|t*1|t*1|t*1|L"),
    ],
)  # fmt: skip
def test_the_embedding_and_the_loss_can_take_the_place_of_a_layer_each(changes, layout):
    args = checked({"--global-batch-size": "16", **changes})
    assert args.pipeline_model_parallel_layout == layout
    assert sum(layers_of_layout(layout, 4)) == args.num_layers


def test_layers_and_ends_must_be_a_multiple_of_the_stages():
    with pytest.raises(ValueError, match=r"^--num-layers 9 and, by .*, 2 more are not a multiple of the 4 stages "):
        checked({"--num-layers": "9", EMBEDDING: None, LOSS: None})


def test_without_the_flag_the_number_must_be_a_multiple():
    with pytest.raises(ValueError, match=r"^--num-layers 10 is not a multiple of the 4 stages .*; --allow-padding-num"):
        checked({"--num-layers": "10"})


V = {"--zero-bubble-schedule": "zb-v", "--global-batch-size": "16"}


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, None),
        ({"--num-layers": "10", "--allow-padding-num-layers": None}, "Et*1|t*2|t*2|t*1|t*1|t*1|t*1|t*1L"),
        ({"--num-layers": "6", EMBEDDING: None, LOSS: None}, "E|t*1|t*1|t*1|t*1|t*1|t*1|L"),
        (
            {"--num-layers": "8", EMBEDDING: None, LOSS: None, "--allow-padding-num-layers": None},
            "E|t*2|t*2|t*1|t*1|t*1|t*1|L",
        ),
        ({"--num-layers": "15", FIRST: "2", LAST: "1"}, "Et*2|t*2|t*2|t*2|t*2|t*2|t*2|t*1L"),
        ({LAYOUT: "Et|t|tt|t|t|t|t|L"}, "Et|t|tt|t|t|t|t|L"),
        ({"--mtp-num-layers": "1"}, "Et*1|t*1|t*1|t*1|t*1|t*1|t*1|t*1mL"),
    ],
)
def test_a_v_takes_any_partition_in_model_order(changes, layout):
    assert checked({**V, **changes}).pipeline_model_parallel_layout == layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--num-layers": "9"}, "--num-layers 9 is not a multiple of the 8 stages .*; --allow-padding-num-layers .*"),
        ({FIRST: "3"}, f"of --num-layers 8, {FIRST} 3 leaves 5 for 7 other stages: each needs the same number .*"),
        ({LAYOUT: "Ett|tt|tt|ttL"}, f"{LAYOUT} .* has 4 stages, but 4 pipeline ranks with 2 model chunks each hold 8"),
    ],
)
def test_layers_that_no_v_has(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        checked({**V, **changes})


def test_a_layout_of_the_users_own_stands():
    own = "Et|ttt|tttt|ttL"
    args = checked({"--num-layers": "10", "--pipeline-model-parallel-layout": own, "--allow-padding-num-layers": None})
    assert args.pipeline_model_parallel_layout == own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({FIRST: "9"}, f"of --num-layers 8, {FIRST} 9 leaves -1 for 3 other pipeline ranks: .*"),
        ({LAST: "8"}, f"of --num-layers 8, {LAST} 8 leaves 0 for 3 other pipeline ranks: .*"),
        ({FIRST: "3"}, f"of --num-layers 8, {FIRST} 3 leaves 5 for 3 other pipeline ranks: each .* same number .*"),
        ({FIRST: "3", LAST: "4"}, f"of --num-layers 8, {FIRST} 3 and {LAST} 4 leaves 1 for 2 other pipeline ranks: .*"),
        ({FIRST: "0"}, f"{FIRST} must be at least 1, got 0"),
        ({LAST: "-1"}, f"{LAST} must be at least 1, got -1"),
        ({LAYOUT: "Et|ttt|tt|tL"}, rf"{LAYOUT} .* has 7 layers, but --num-layers is 8"),
        ({LAYOUT: "Et|ttt|ttt|tL", FIRST: "1"}, f"{FIRST} 1 and {LAYOUT} .* both say how many layers .*"),
        ({LAYOUT: "Et|ttt|ttt|tL", LOSS: None}, f"{LAYOUT} .* and {EMBEDDING} or {LOSS} both say how many layers .*"),
        ({FIRST: "2", EMBEDDING: None}, f"{FIRST} 2 and {EMBEDDING} or {LOSS} both say how many layers .*"),
        (
            {FIRST: "3", "--num-virtual-stages-per-pipeline-rank": "2", "--num-layers": "9"},
            f"{FIRST} 3: pipeline ranks with 3, 2 layers cannot be cut into 2 even model chunks each",
        ),
    ],
)
def test_layers_that_would_not_be_those_asked_for(changes, message):
    """megatron-core builds some of these, with more or fewer layers than `--num-layers`."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        checked({"--global-batch-size": "16", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {FIRST: "2"},
        {FIRST: "1", LAST: "3"},
        {FIRST: "5", LAST: "1"},
        {FIRST: "4", LAST: "4", "--pipeline-model-parallel-size": "2"},
        {FIRST: "2", LAST: "2", "--num-virtual-stages-per-pipeline-rank": "2"},
    ],
)
def test_layers_of_the_first_and_the_last_rank_that_add_up(changes):
    checked({"--global-batch-size": "16", **changes})


UNEVEN = [
    *(*TINY_GPT, "--num-layers", "5", "--train-iters", "3", "--allow-padding-num-layers"),
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4"),
]
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
ENDS = (*CHUNKS, "--num-layers", "2", EMBEDDING, LOSS)
"""A layout of four stages: the first has the embedding alone, and the last the loss."""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    flags = {
        "base": UNEVEN,
        "zb-h1": [*UNEVEN, "--zero-bubble-schedule", "zb-h1"],
        "base-chunks": [*UNEVEN, *CHUNKS],
        "interleaved-zb": [*UNEVEN, *CHUNKS, "--zero-bubble", "--zero-bubble-keep-layout"],
        "base-ends": [*UNEVEN, *ENDS],
        "ends": [*UNEVEN, *ENDS, "--zero-bubble"],
        "first": [*UNEVEN, FIRST, "3", "--zero-bubble"],
    }
    return Trainings(2, flags, tmp_path_factory.mktemp("layers"))


def test_schedules_equal_megatron_cores_with_uneven_stages(trainings: Trainings) -> None:
    names = ("base", "zb-h1", "base-chunks", "interleaved-zb", "base-ends", "ends", "first")
    numerics = {name: trainings.numerics(name) for name in names}
    assert numerics["zb-h1"] == numerics["first"] == numerics["base"]
    assert numerics["interleaved-zb"] == numerics["base-chunks"] != numerics["base"]
    assert numerics["ends"] == numerics["base-ends"] != numerics["base"]


def test_the_start_up_lines_say_what_each_stage_got(trainings: Trainings) -> None:
    assert re.search(r"^ > layers of each stage: 3, 2$", trainings.printed("zb-h1"), re.MULTILINE)
