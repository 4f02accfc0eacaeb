"""Patterns of hybrid models, and the layouts that their `|`s are."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.zero_bubble.planner.request import Layout
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import chunks_of_flags, needed_layout, partition_of_flags, partition_sources
from megatron.zero_bubble.session.layout_choice import SAVED_NAMES, is_layout_open, saved_choice
from megatron.zero_bubble.session.layout_words import flags_of_layout

P2 = {"pipeline_model_parallel_size": 2, "num_layers": 5, "zero_bubble": True}


@pytest.mark.parametrize("text", ["*-*-", "*-|*-", "|M|-", "*E|M-/*-/*-", "*-/-", ""])
def test_a_pattern_is_written_as_it_was_read(text: str):
    assert str(HybridPattern.parse(text)) == text


def test_a_pattern_is_divided_anew():
    pattern = HybridPattern.parse("*E|M-*/*-/*-")
    assert (pattern.symbols, pattern.partition, pattern.is_divided) == ("*EM-*", (2, 3), True)
    assert str(pattern.divided((1, 0, 4))) == "*||EM-*/*-/*-"
    assert str(pattern.whole()) == "*EM-*/*-/*-"
    assert not pattern.whole().is_divided


def test_stages_of_a_pattern_are_the_jobs():
    flags = JobFlags(**P2, hybrid_layer_pattern="*|-*|M|-")
    assert chunks_of_flags(flags) == 2
    assert partition_of_flags(flags, Placement("v", 2, 2)) == (1, 2, 1, 1)
    assert partition_sources(flags) == ["--hybrid-layer-pattern *|-*|M|-"]
    assert not is_layout_open(flags)
    assert needed_layout(flags, Placement("v", 2, 2), (1, 2, 1, 1)) is None


def test_a_pattern_with_another_number_of_stages_is_refused():
    flags = JobFlags(**P2, hybrid_layer_pattern="*-|*|-M")
    with pytest.raises(ValueError, match=r"^--hybrid-layer-pattern \*-\|\*\|-M has 3 stages, but 2 pipeline ranks"):
        partition_of_flags(flags, Placement("linear", 2))


def test_a_pattern_without_stages_leaves_the_layout_open():
    flags = JobFlags(**P2, hybrid_layer_pattern="*-*M-")
    assert is_layout_open(flags)
    assert chunks_of_flags(flags) is None


def test_a_chosen_layout_is_a_pattern_and_is_kept_with_the_checkpoint():
    layout = Layout(Placement("v", 2, 2), (1, 2, 1, 1))
    flags = JobFlags(**P2, hybrid_layer_pattern="*-*M-/*")
    chosen = flags_of_layout(layout, 1, flags.pattern)
    assert chosen["hybrid_layer_pattern"] == "*|-*|M|-/*"
    assert "pipeline_model_parallel_layout" not in chosen
    saved = Namespace(**dict.fromkeys(SAVED_NAMES), **P2)
    vars(saved).update(chosen)
    choice = saved_choice(saved, flags)
    assert choice is not None
    assert choice.flags["hybrid_layer_pattern"] == "*|-*|M|-/*"
    assert saved_choice(saved, JobFlags(**P2, hybrid_layer_pattern="-**M-/*")) is None
