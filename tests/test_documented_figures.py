"""Figures that README.md and docs/ state stand in docs/benchmarks.md, or below the command that prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation_commands import commands_of, pages
from tests.launch import ROOT

_FIGURE = re.compile(r"(?<![\w.`-])(\d+\.\d+|\d+(?= to \d+%)|\d+(?=%))(?![\w`])")
"""A decimal, or a percentage: counts of ranks and microbatches are not measured."""
_RATIO = re.compile(r"\d+\.\d+ times|\d+(?:\.\d+)?% (?:faster|slower|longer|higher|lower)")
_THRESHOLD = re.compile(r"at least (?:\d[\d.]*%|\d+\.\d+ times)")
"""Ratios below which the planner keeps a plan are rules, and not measured."""


def sections(page: Path) -> dict[str, str]:
    """The text of every section of a page, by the anchor of its heading."""
    parts = re.split(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {slug(title): text for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_links_lead_to_headings_of_the_pages_in_the_repository(page: Path) -> None:
    """`make docs` checks the links of the site, whose generated tables have further headings."""
    for path, anchor in re.findall(r"\]\(((?:[\w/.-]+\.md)?)#([^)\s]+)\)", page.read_text()):
        assert anchor in sections(page.parent / path if path else page)


BENCHMARKS = sections(ROOT / "docs" / "benchmarks.md")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a section outside of code and tables, and their parts between semicolons."""
    prose = re.sub(r"^```.*?^```$|^(?: {4}|\|)[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose):
        yield from re.split(r"(?<=[.:]) (?=[A-Z`*\[])|(?<=;) ", " ".join(paragraph.split()))


def linked() -> Iterator[tuple[str, str, str]]:
    """Page, sentence, and the section of docs/benchmarks.md that the sentence links to."""
    for page in pages():
        for text in sections(page).values():
            for sentence in sentences(text):
                for anchor in re.findall(r"benchmarks\.md#([\w-]+)\)", sentence):
                    yield page.name, sentence, anchor


def is_among(figure: str, text: str) -> bool:
    """Whether a number of `text`, or its distance from 1 in per cent, rounds to `figure`."""
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2]) + 1e-9
    numbers = [float(number) for number in re.findall(r"\d+\.\d+|\d+", text)]
    return any(abs(value - float(figure)) <= half for number in numbers for value in (number, 100 * number - 100))


@pytest.mark.parametrize(("page", "sentence", "anchor"), list(linked()))
def test_a_figure_with_a_link_stands_in_the_section(page: str, sentence: str, anchor: str) -> None:
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", "", sentence)
    assert [figure for figure in _FIGURE.findall(prose) if not is_among(figure, BENCHMARKS[anchor])] == []


def test_links_with_figures_are_found() -> None:
    assert sum(bool(_FIGURE.search(sentence)) for _, sentence, _ in linked()) > 4


def test_figures_are_compared_as_they_are_rounded() -> None:
    section = "| 1.046 | +1.78% | 1.115 |"
    assert all(is_among(figure, section) for figure in ("1.05", "1.8", "11", "12", "1.1"))
    assert not any(is_among(figure, section) for figure in ("1.04", "1.7", "13", "1.2"))


def test_every_measurement_has_its_command_and_its_figures() -> None:
    measured = {anchor: text for anchor, text in BENCHMARKS.items() if anchor != "benchmarks"}
    assert len(measured) > 10
    for anchor, text in measured.items():
        assert commands_of(text, anchor) or "\n    for model in" in text, anchor
        assert re.search(r"^\|.*\d|^\S.*\d[.%]", text, re.MULTILINE), anchor


def test_ratios_elsewhere_have_a_command_or_a_link() -> None:
    for page in pages():
        for anchor, text in sections(page).items():
            for sentence in sentences(text):
                if _RATIO.search(_THRESHOLD.sub("", sentence)) and page.name != "benchmarks.md":
                    assert commands_of(text, anchor) or "benchmarks.md" in text, f"{page.name}#{anchor}: {sentence}"


def test_the_table_of_the_readme_has_the_situations() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("|") and re.search(r"\d\.\d", line)]
    measured = [line for line in BENCHMARKS["what-you-get"].splitlines() if re.search(r"\d\.\d", line)]
    assert len(rows) == len(measured) > 3
    for row, line in zip(rows, measured, strict=True):
        assert re.split(r"\s*\|\s*", row)[2:4] == [f"{ratio:.2f}" for ratio in ratios_of(line)]


def ratios_of(line: str) -> list[float]:
    """The ratios to 1F1B of a row of situations: of zero bubble, and of megatron-core's interleaved schedule."""
    cells = re.split(r"\s*\|\s*", line)[3:5]
    return [float(re.findall(r"[0-9.]+", cell)[0]) for cell in cells]


def test_the_bubble_of_interleaved_recipes_is_that_of_the_table() -> None:
    text = (ROOT / "docs" / "who_gains.md").read_text()
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in text.splitlines() if re.match(r"\| \w+ \| \d", line)]
    published = [row for previous, row in zip([["", ""], *rows], rows, strict=False) if previous[0] != row[0]]
    bubbles = [float(row[2].rstrip("%")) for row in published if int(row[1].split(", ")[1]) > 1]
    assert len(bubbles) > 2
    for page in (ROOT / "README.md", ROOT / "docs" / "who_gains.md"):
        assert f"{min(bubbles):.1f} to {max(bubbles):.1f}%" in " ".join(page.read_text().split())
