"""The table of operation kinds is complete, and what follows from a kind is read from it alone."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.schedule import Bubble, Op, OpKind, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.kinds import COMMUNICATION, KINDS, MESSAGES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron" / "zero_bubble"
READERS = ("costs", "graph", "simulate", "analysis", "memory", "timeline", "formats/*", "draw/*")
"""Modules that treat all kinds alike: none of them may name one."""


def test_every_kind_has_a_row_that_names_what_exists():
    assert set(KINDS) == set(OpKind)
    for kind, facts in KINDS.items():
        assert all(hasattr(StageCosts.uniform(2), name) for name in facts.time + facts.memory)
        assert {need.result for need in facts.needs} <= set().union(*(other.makes for other in KINDS.values()))
        if kind not in COMMUNICATION:
            assert facts.waiting in Bubble.__dataclass_fields__
            assert facts.makes


def test_the_two_ends_of_a_message_name_each_other():
    for kind, message in MESSAGES.items():
        other = MESSAGES[message.other_end]
        assert other.other_end is kind
        assert (other.is_send, other.neighbour) == (not message.is_send, -message.neighbour)


def test_a_word_that_is_no_kind_is_an_error():
    assert Op.parse("WT3.1") == Op(OpKind.W, 3, 1), "as release 0.1 wrote it"
    with pytest.raises(ScheduleError, match="'Q3' is not an operation: expected a kind \\(F, B, W, BW, "):
        Op.parse("Q3")


@pytest.mark.parametrize("pattern", READERS)
def test_what_treats_all_kinds_alike_names_none(pattern):
    paths = sorted((PACKAGE / "schedule").glob(f"{pattern}.py"))
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = [
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "OpKind"
        ]
        assert not named, f"{path.name} must read the table, not name {named}"


USES_LOAD = """
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import *
from megatron.zero_bubble.schedule import draw, formats
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind
from plan import load_ahead

plain = generate("zb-h1", 8, 32)
schedule = load_ahead(plain)
costs = StageCosts.uniform(8)
validate(schedule)
lowered = lower(schedule)
validate(lowered)
assert lowered.without_communication() == schedule

timeline = simulate(schedule, costs)
assert timeline.makespan == simulate(plain, costs).makespan
assert max(simulate(plain, costs).peak_memory) == 8
assert max(timeline.peak_memory) < 8, timeline.peak_memory

for to_text, from_text in ((formats.schedule_to_json, formats.schedule_from_json),
                           (formats.schedule_to_csv, formats.schedule_from_csv)):
    assert from_text(to_text(schedule)) == schedule
svg = draw.to_svg(timeline)
assert KINDS[OpKind.LOAD].colour in svg and KINDS[OpKind.LOAD].meaning in svg
draw.to_html(timeline), draw.to_chrome_trace(timeline)

ops = list(schedule.ops[0])
load, b = ops.index(Op(OpKind.LOAD, 3)), ops.index(Op(OpKind.B, 3))
ops[load], ops[b] = ops[b], ops[load]
try:
    validate(Schedule("late", schedule.placement, 32, (tuple(ops), *schedule.ops[1:])))
except InvalidSchedule as error:
    assert "rank 0 runs B3 before LOAD3, which it needs" in str(error), error
else:
    raise AssertionError("B3 does not wait for LOAD3")
"""


def test_the_worked_example_of_a_new_kind_works(tmp_path):
    """In a copy: a row, a handler and a pass, as CONTRIBUTING.md shows them, are all that LOAD needs."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diffs = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    [plan] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(diffs) == 2
    copy = tmp_path / "megatron" / "zero_bubble"
    for room in ("schedule", "planner"):
        shutil.copytree(PACKAGE / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "runtime").mkdir()
    shutil.copy(PACKAGE / "runtime" / "executor.py", copy / "runtime")
    (tmp_path / "plan.py").write_text(plan)
    for diff in diffs:
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    assert "OpKind.LOAD: self._load" in (copy / "runtime" / "executor.py").read_text()
    # Isolated and without site-packages nothing but the copy and Python itself is there.
    command = [sys.executable, "-IS", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{USES_LOAD}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
