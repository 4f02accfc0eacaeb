"""The random models of benchmarks/random_models.py, and the comparison of their layouts."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.random_models import chosen_layout, main, random_request
from megatron.zero_bubble.planner import search_layouts
from megatron.zero_bubble.schedule import Placement

SMALL = 60
"""Most layers times microbatches."""


def test_a_model_depends_on_its_seed_alone():
    request, limit = random_request(3)
    assert (request, limit) == random_request(3) != random_request(4)
    assert 2 <= request.num_ranks <= 16
    assert 1 <= limit <= 2
    assert request.capacity is not None


def test_models_can_be_kept_small():
    for seed in range(50):
        request, _ = random_request(seed, SMALL)
        assert len(request.model.layers) * request.num_microbatches <= SMALL


def test_the_chosen_layout_is_close_to_the_best_fixed_choice():
    found = chosen_layout(5, SMALL)
    assert found.above_best is not None
    assert 1 <= found.above_best <= 1.03
    assert found.beside_1f1b >= 1


def test_layers_move_in_layouts_that_are_far_behind_at_first():
    """Memory is short: on its balanced partition, the layout to choose takes 1.14 times as long as the best one."""
    request, _ = random_request(41020, 1500)
    chosen = search_layouts(request)
    interleaved = Placement("interleaved", request.num_ranks, 2)
    fixed = replace(request, usual=None, placements=(interleaved,), vocabulary_parallel=False)
    assert chosen.time <= search_layouts(fixed).time * 1.03


def test_the_table_has_a_row_for_all_models(capsys):
    flags = ["--first-seed", "5", "--models", "1", "--operations", str(SMALL)]
    assert main(flags) == 0
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.startswith("models")
    assert row.split()[0] == "1"
    assert main([*flags, "--json"]) == 0
    assert [one["seed"] for one in json.loads(capsys.readouterr().out)] == [5]
