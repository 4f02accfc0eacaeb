from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import document_schedules
from benchmarks.published import PUBLISHED
from megatron.zero_bubble.planner import names

ROOT = Path(__file__).parent.parent.parent

PAGE = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", names())
def test_every_schedule_is_documented(name):
    """If this fails: python -m benchmarks.document_schedules."""
    assert f"### {name}\n" in PAGE
    assert f"\n| `{name}` " in PAGE
    ElementTree.parse(ROOT / "docs" / "schedules" / f"{name}.svg")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb"])
def test_the_comparison_is_up_to_date(name):
    """If this fails: python -m benchmarks.document_schedules."""
    assert f"| {' | '.join(document_schedules.row(name))} |" in PAGE.splitlines()


def test_the_rates_of_gpipe_are_those_of_its_formula():
    rates = []
    for model in PUBLISHED.values():
        f, b, w, message = model.times
        bubble = (model.num_ranks - 1) * (f + b + w + 2 * message)
        rates.append(100 * bubble / (bubble + model.num_microbatches * (f + b + w)))
    assert document_schedules.row("gpipe")[3] == f"{min(rates):.1f}-{max(rates):.1f}%"


def test_the_example_runs():
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict = {}
    exec(example, scope)
    assert f"{scope['timeline'].bubble_rate:.4f}".startswith("0.14")
    assert scope["timeline"].peak_memory == (4, 3.5, 3, 2.5)


def test_marks_are_filled_and_missing_ones_refused():
    page = "a\n<!-- generated: x -->\nold\n<!-- end -->\nb\n"
    assert document_schedules.fill(page, "x", "new\n") == "a\n<!-- generated: x -->\nnew\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match="found 0"):
        document_schedules.fill(page, "y", "new\n")
