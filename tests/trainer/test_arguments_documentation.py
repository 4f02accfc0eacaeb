"""docs/megatron_flags.md says which flags the trainer takes otherwise than Megatron-LM; docs/training.md has ours."""

from __future__ import annotations

import re

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.session.aliases import AliasFlags
from megatron.zero_bubble.session.flag_parser import make_parser
from megatron.zero_bubble.trainer.arguments import FLAG_GROUPS
from tests.launch import ROOT
from tests.trainer.test_arguments import IN_USE_ELSEWHERE, WITHOUT_OUR_NAME

SECTIONS = ("The same, with a difference", "Elsewhere")


def flags_of_sections() -> dict[str, set[str]]:
    page = (ROOT / "docs" / "megatron_flags.md").read_text()
    _, *parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    # In a table only the first column is a flag of Megatron's.
    lines = {
        name: [line.split("|")[1] if "|" in line else line for line in text.splitlines()]
        for name, text in sections.items()
    }
    return {name: set(re.findall(r"`(--[a-z0-9_-]+)", "\n".join(text))) for name, text in lines.items()}


def test_the_page_and_the_parser_know_the_same_flags() -> None:
    """A flag that the trainer learns is not `Elsewhere` any more."""
    listed = flags_of_sections()
    assert tuple(listed) == SECTIONS
    parser = make_parser(FLAG_GROUPS)
    ours = {name for name in parser._option_string_actions if "zero-bubble" in name} | WITHOUT_OUR_NAME
    known = {*parser._option_string_actions} - ours - {*IN_USE_ELSEWHERE.split(), "--help", "-h"}
    assert listed["The same, with a difference"] <= known
    assert not known & listed["Elsewhere"]


def test_every_flag_of_zero_bubble_is_on_the_page_about_training() -> None:
    options = {*make_parser(FLAG_GROUPS)._option_string_actions, *make_parser((LaunchFlags,))._option_string_actions}
    ours = {name for name in options if "zero-bubble" in name or "hierarchical-sgd" in name}
    aliases = {*make_parser((AliasFlags,))._option_string_actions}
    page = (ROOT / "docs" / "training.md").read_text()
    assert ours - aliases - set(re.findall(r"`(--[a-z0-9-]+)", page)) == set()
