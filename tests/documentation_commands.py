"""The commands that README.md and docs/*.md show, and the reasons why some of them cannot run in a test."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.launch import ROOT

_PROGRAMS = r"(?:make|torchrun|zero-bubble|python|pip|git|srun|sbatch|chrt|zero-bubble-\w+|examples/\S+|tools/\S+)"
_COMMAND = re.compile(rf"^(?:\w+=(?:\"[^\"]*\"|\S+) )*{_PROGRAMS}(?: |$)")
_TABLE_ROW = re.compile(r"^\S+ {3,}")
"""A row of a printed table, whose first word may be like a program."""

SKIPPED = {
    r"<[a-z]": "has values for the reader to fill in",
    r"(^| )\.\.\. |/path/to": "has values for the reader to fill in",
    r"--(pipeline-size|num-microbatches|output-layers|time-f|num-chunks|output|timeline) [A-Z]+\b": (
        "has values for the reader to fill in"
    ),
    r"^chrt|-m benchmarks\.": "measures for minutes on a machine that does nothing else",
    r"benchmark --(pipeline-size| )": "measures for minutes on a machine that does nothing else",
    r"sbatch |^make test-slurm": "needs Slurm: make test-slurm",
    r"^make (lint|test|test-rest|test-all|test-browser|docs|docs-check)\b": "is a check itself, which CI calls",
    r"^make gpu-check|zero-bubble check|megatron\.zero_bubble\.cli check": (
        "checks for minutes: tests/cli/test_check_ranks.py runs it"
    ),
    r"^(make|zero-bubble) playground": "serves until Ctrl-C: make test-browser opens it",
    r"^pip ": "changes the environment",
    r"\$model": "stands in a loop",
}
"""Patterns of commands that do not run in `make docs-check`, with the reason."""


SHORTER = {"make pretrain": "--train-iters 20", "make compare": "--rounds 1 --iterations 5"}
"""Flags with which commands of make run in `make docs-check`; as they stand they train for minutes."""


@dataclass(frozen=True)
class Command:
    """A command of a page; `line` is the number of its first line there."""

    page: str
    line: int
    text: str

    @property
    def is_of_the_package(self) -> bool:
        return self.text.startswith("zero-bubble ")

    @property
    def reason_to_skip(self) -> str | None:
        return next((reason for pattern, reason in SKIPPED.items() if re.search(pattern, self.text)), None)


def commands() -> list[Command]:
    """All commands in the code blocks of README.md and docs/*.md, with their continued lines joined."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [command for page in pages for command in _commands_of(page)]


def _commands_of(page: Path) -> list[Command]:
    lines, found = page.read_text().splitlines(), []
    number = 0
    while number < len(lines):
        first = number
        text = lines[number]
        while text.endswith("\\") and number + 1 < len(lines):
            number += 1
            text = text[:-1] + lines[number].strip()
        number += 1
        if not text.startswith("    "):
            continue
        text = re.sub(r"\s+#\s.*$", "", textwrap.dedent(text))
        if _COMMAND.match(text) and not _TABLE_ROW.match(text):
            found.append(Command(str(page.relative_to(ROOT)), first + 1, text))
    return found
