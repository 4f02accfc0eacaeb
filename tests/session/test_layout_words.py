"""A layout is shown in a table, and as the flags that give it to another run."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.planner import Layout
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.layout_choice import choose_layout
from megatron.zero_bubble.session.layout_words import flags_of_layout, layers_words, named_plans
from megatron.zero_bubble.session.reports import layout_lines
from tests.session.layout_jobs import HEAVY, MODEL, WHOLE, flags


def test_the_chosen_layout_as_flags_makes_the_same_layout_again() -> None:
    layout = Layout(Placement("v", 4, 2), (0, 1, 1, 2, 1, 1, 2, 0))
    chosen = flags_of_layout(layout)
    again = flags(**chosen)
    assert again.model_chunks == 2
    assert again.zero_bubble_placement == "v"
    assert chosen["pipeline_model_parallel_layout"] == "E|t*1|t*1|t*2|t*1|t*1|t*2|L"


def test_the_table_says_what_was_gained_and_which_flags_repeat_it() -> None:
    found = choose_layout(WHOLE, MODEL, None, 1024)
    lines = list(layout_lines(found, flags_of_layout(found.plan.layout)))
    assert lines[0] == " > layout chosen for 4 ranks and 8 microbatches"
    assert "8 layers 1.00 + 1.00 + 0.80 each; embedding 0.01 + 0.00 + 0.01; output 3.00 + 3.00 + 3.00" in lines[1]
    assert lines[3].split()[:5] == ["chosen:", "linear", "2", "3x2", "0"]
    assert lines[4].startswith("     Megatron's split, auto  2x4 ")
    assert lines[-1].endswith(
        "--pipeline-model-parallel-layout 'Et*2|t*3|t*3|L' --zero-bubble-placement linear "
        "--zero-bubble-seed-by-layer --zero-bubble-vocabulary-parallel off"
    )
    times = found.megatrons[0].time / found.plan.time
    assert lines[-2].startswith(f"     speed relative to Megatron's split: {times:.3f} under auto, ")


def test_a_hybrid_layout_is_shown_and_repeated_by_its_symbols() -> None:
    pattern = HybridPattern.parse("-M*M-M*M")
    found = choose_layout(WHOLE, MODEL, None, 1024)
    lines = list(layout_lines(found, flags_of_layout(found.plan.layout, pattern=pattern)))
    assert "2 layers -: 1.00 + 1.00 + 0.80 each; 4 layers M: 1.00 + 1.00 + 0.80 each; 2 layers *: 1.00" in lines[1]
    assert lines[3].startswith("     chosen: linear          -M | *M- | M*M |   ")
    assert lines[4].startswith("     Megatron's split, auto  -M | *M | -M | *M  ")
    assert "--hybrid-layer-pattern='-M|*M-|M*M|'" in lines[-1]


def test_a_draft_is_named_as_one() -> None:
    chosen = choose_layout(WHOLE, MODEL, None, 1024).plan
    names = [name for name, _ in named_plans(replace(chosen, others=(chosen, replace(chosen, is_draft=True))), ())]
    assert names == ["chosen: linear", "linear", "linear, draft"]


def test_equal_stages_are_counted() -> None:
    assert layers_words(Layout(Placement("linear", 5), (4, 5, 5, 5, 2))) == "4 5x3 2"


def test_the_table_says_where_the_vocabulary_is_spread() -> None:
    found = choose_layout(flags(num_layers=16), HEAVY, None, 1024)
    lines = list(layout_lines(found, flags_of_layout(found.plan.layout)))
    assert ", vocabulary shards" in lines[3]
    assert "--zero-bubble-vocabulary-parallel on" in lines[-1]
