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

_SHELLS = ("", "bash", "sh", "shell", "console", "text")

SKIPPED = {
    r"<[a-z]": "has values for the reader to fill in",
    r"(^| )\.\.\. |/path/to": "has values for the reader to fill in",
    r"--(pipeline-size|num-microbatches|output-layers|time-f|num-chunks|output|timeline) [A-Z]+\b": (
        "has values for the reader to fill in"
    ),
    r"^chrt|-m benchmarks\.": "measures for minutes on a machine that does nothing else",
    r"benchmark --(pipeline-size| )": "measures for minutes on a machine that does nothing else",
    r"sbatch |^make test-slurm": "needs Slurm: make test-slurm",
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
    """Return all commands in the code blocks of the pages, with their continued lines joined."""
    return [command for page in pages() for command in commands_of(page.read_text(), str(page.relative_to(ROOT)))]


def pages() -> list[Path]:
    """Return README.md and all pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(text: str, page: str) -> list[Command]:
    """Return the commands of one page: in indented blocks, and in fenced blocks of a shell or without a language."""
    shown, lines = [], text.splitlines()
    language: str | None = None  # of the fenced block around a line; None outside of one
    number = 0
    while number < len(lines):
        first, line = number, lines[number]
        number += 1
        if line.strip().startswith("```"):
            language = line.strip().removeprefix("```").strip() if language is None else None
            continue
        while line.endswith("\\") and number < len(lines):
            line = line[:-1] + lines[number].strip()
            number += 1
        if line.startswith("    ") if language is None else language in _SHELLS:
            line = re.sub(r"\s+#\s.*$", "", textwrap.dedent(line).removeprefix("$ "))
            if _COMMAND.match(line) and not _TABLE_ROW.match(line):
                shown.append(Command(page, first + 1, line))
    return shown


def fenced_blocks(language: str) -> list[tuple[str, str]]:
    """Return page and text of every fenced block of one language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(str(page.relative_to(ROOT)), block) for page in pages() for block in fence.findall(page.read_text())]
