"""The page lists what is really hooked, and which versions.

Users read there whether a Megatron-LM of another version, or with changes of their own, works with the launcher.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.hook_table import ScriptHooks, cpu_hooks
from megatron.zero_bubble.launcher.hooks import Needed
from megatron.zero_bubble.launcher.launch import SUPPORTED
from tests.launch import ROOT

PAGE = (ROOT / "docs" / "hooks.md").read_text()
VERSIONS = (ROOT / "docs" / "megatron_versions.md").read_text()


def rows(needed: Iterable[Needed]) -> list[str]:
    """One row for neighbours with the same explanation."""

    def explained(one: Needed) -> str:
        return one.reason + (f" ({', '.join(one.versions)} only)" if one.versions else "")

    return [
        f"| {' '.join(f'`{one.target}`' for one in alike)} | {reason} |" for reason, alike in groupby(needed, explained)
    ]


def test_the_tables_are_those_of_the_code():
    session = ScriptHooks(LaunchFlags(zero_bubble_post_validation=True, hierarchical_sgd="2:2"))
    expected = rows([*session.hooks(), *session.needed(), *cpu_hooks()])
    assert [line for line in PAGE.splitlines() if line.startswith("| `megatron.")] == expected


def test_the_versions_are_those_of_the_code():
    rows = [line for line in VERSIONS.splitlines() if line.startswith("| 0.")]
    assert [line.split("|")[1].strip() for line in rows] == list(SUPPORTED)
