"""The page that says what works with what follows from the table of settings, and its tests exist."""

from __future__ import annotations

from megatron.zero_bubble.mcore.compatibility.setting_rows import Effect
from tests.launch import ROOT
from tools.compatibility_page import ROWS, FeatureRow, _shown, effects, page


def test_the_page_is_made_from_the_table() -> None:
    """If this fails: python -m tools.compatibility_page > docs/compatibility.md"""
    assert (ROOT / "docs" / "compatibility.md").read_text() == page()


def test_every_row_names_a_setting_or_a_status_and_tests_that_exist() -> None:
    classified = dict(effects())
    assert [row.title for row in ROWS if not row.status and row.setting not in classified] == []
    assert [row.test for row in ROWS if row.test and not (ROOT / "tests" / row.test).is_file()] == []


def test_what_works_has_a_test() -> None:
    works = (Effect.RUN, Effect.HANDLED)
    rows = [row for row in ROWS if row.status == "yes" or (row.setting and dict(effects())[row.setting] in works)]
    assert len(rows) > 15
    assert [row.title for row in rows if not row.test] == []


def test_refusals_of_a_setting_stand_in_its_row() -> None:
    shown = _shown(FeatureRow("experts", "expert_model_parallel_size"))
    assert "| `--hierarchical-sgd` (above 1) |" in shown
    assert "| no |" in _shown(FeatureRow("graphs", "cuda_graph_impl"))
