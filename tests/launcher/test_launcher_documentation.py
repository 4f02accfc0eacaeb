"""The page lists what is really hooked, and which versions."""

from __future__ import annotations

from megatron.zero_bubble.launcher.flags import LaunchFlags
from megatron.zero_bubble.launcher.launch import SUPPORTED
from megatron.zero_bubble.launcher.session import Session, cpu_hooks
from tests.launch import ROOT

PAGE = (ROOT / "docs" / "megatron_lm.md").read_text()


def test_the_tables_are_those_of_the_code():
    hooks = [*Session(LaunchFlags(zero_bubble_post_validation=True)).hooks(), *cpu_hooks()]
    expected = []
    for hook in hooks:
        versions = f" ({', '.join(hook.versions)} only)" if hook.versions else ""
        expected.append(f"| `{hook.target}` | {hook.reason}{versions} |")
    assert [line for line in PAGE.splitlines() if line.startswith("| `megatron.")] == expected


def test_the_versions_are_those_of_the_code():
    assert [line for line in PAGE.splitlines() if line.startswith("| 0.")] != []
    assert [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| 0.")] == list(SUPPORTED)
