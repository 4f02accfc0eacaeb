"""What the documentation tells users to type is known: it runs in `make docs-check`, or a reason says why it cannot."""

from __future__ import annotations

import re

from tests.documentation_commands import SKIPPED, commands
from tests.launch import ROOT


def test_commands_are_found_and_most_of_the_commands_own_run() -> None:
    shown = commands()
    running = [command.text for command in shown if command.reason_to_skip is None]
    assert "make pretrain" in running
    assert "make compare" in running
    assert sum(text.startswith("zero-bubble schedule") for text in running) > 8
    assert any(text.startswith("zero-bubble estimate") for text in running)
    assert all(text.split()[0] in ("make", "zero-bubble", "python", "torchrun") for text in running), running


def test_every_reason_to_skip_is_needed() -> None:
    texts = [command.text for command in commands()]
    assert [pattern for pattern in SKIPPED if not any(re.search(pattern, text) for text in texts)] == []


def test_the_site_leads_to_every_page() -> None:
    """`make docs` fails where one is missing."""
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == set()
