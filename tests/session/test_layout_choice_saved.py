"""A resumed job keeps the layout of its checkpoint unless its model, its ranks or its flags ask for another layout."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.zero_bubble.planner import Layout
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layout_choice import saved_choice
from megatron.zero_bubble.session.layout_words import flags_of_layout
from megatron.zero_bubble.session.settings import job_settings
from tests.session.layout_jobs import flags


def saved(**changed: object) -> Namespace:
    """The arguments in the checkpoint of a job whose layout was chosen."""
    chosen = flags_of_layout(Layout(Placement("v", 4, 2), (0, 1, 1, 2, 1, 1, 2, 0)))
    return Namespace(**{**vars(flags()), **chosen, **changed})


def test_a_job_that_goes_on_keeps_the_layout_and_the_seeds_that_were_saved() -> None:
    for by_layer in (True, False):
        choice = saved_choice(saved(zero_bubble_seed_by_layer=by_layer), flags())
        assert choice is not None
        again = flags(**choice.flags)
        assert again.model_chunks == 2
        assert again.zero_bubble_placement == "v"
        assert again.zero_bubble_seed_by_layer is by_layer


LIMITS = {"zero_bubble_layout_limits": (100.0, 200.0, 200.0, 100.0)}
"""The memory limits under which the saved layout was chosen. Its own 1F1B may need another amount of memory."""


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ({}, True),
        ({"zero_bubble_memory_limit": "2"}, False),
        ({"micro_batch_size": 4}, False),
        ({"world_size": 16}, False),
    ],
)
def test_a_job_that_goes_on_keeps_the_memory_limits_of_the_layout(given: dict[str, object], is_kept: bool) -> None:
    now = JobFlags.of(Namespace(**vars(flags(**given))))
    choice = saved_choice(saved(**LIMITS), now)
    assert choice is not None
    planning = job_settings(now, {}, has_cuda=False, choice=choice).planning
    assert planning.limits == (LIMITS["zero_bubble_layout_limits"] if is_kept else None)


@pytest.mark.parametrize(
    ("layout", "is_megatrons"),
    [
        (Layout(Placement("linear", 4), (2, 2, 2, 2)), True),
        (Layout(Placement("linear", 4), (2, 2, 2, 2), vocabulary_parallel=True), False),
        (Layout(Placement("linear", 4), (1, 3, 2, 2)), False),
        (Layout(Placement("v", 4, 2), (1,) * 8), False),
    ],
)
def test_a_job_that_goes_on_with_megatrons_split_compares_the_planned_order_with_megatrons_order(
    layout: Layout, is_megatrons: bool
) -> None:
    choice = saved_choice(Namespace(**{**vars(flags()), **flags_of_layout(layout)}), flags())
    assert choice is not None
    assert choice.is_megatrons_split is is_megatrons
    planning = job_settings(flags(), {}, has_cuda=False, choice=choice).planning
    assert planning.tries_own_order is is_megatrons


def test_a_job_with_the_same_number_of_chunks_keeps_the_layout() -> None:
    choice = saved_choice(saved(zero_bubble_placement="interleaved"), flags(num_virtual_stages_per_pipeline_rank=2))
    assert choice is not None
    assert choice.flags["num_virtual_stages_per_pipeline_rank"] is None


@pytest.mark.parametrize(
    ("changed", "given"),
    [
        ({"num_layers": 9}, {}),
        ({"pipeline_model_parallel_size": 2}, {}),
        ({"zero_bubble_placement": None}, {}),
        ({}, {"zero_bubble_placement": "linear"}),
        ({}, {"zero_bubble_recompute": "planned"}),
        ({}, {"recompute_granularity": "full"}),
        ({"recompute_granularity": "full"}, {}),
        ({}, {"num_virtual_stages_per_pipeline_rank": 2}),
        ({}, {"num_layers_per_virtual_pipeline_stage": 1}),
        ({"zero_bubble_seed_by_layer": False}, {"zero_bubble_seed_by_layer": True}),
        ({"zero_bubble_recompute": "planned"}, {"use_torch_fsdp2": True}),
        ({"zero_bubble_vocabulary_parallel": "on"}, {"use_torch_fsdp2": True}),
    ],
)
def test_a_saved_layout_is_not_kept_by_another_job(changed: dict[str, object], given: dict[str, object]) -> None:
    assert saved_choice(saved(), flags()) is not None
    assert saved_choice(saved(**changed), flags(**given)) is None
