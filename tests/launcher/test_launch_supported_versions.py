"""The page about versions lists those that the launcher supports."""

from __future__ import annotations

from megatron.zero_bubble.launcher.launch import SUPPORTED
from tests.launch import ROOT

VERSIONS = (ROOT / "docs" / "megatron_versions.md").read_text()


def test_the_versions_are_those_of_the_code():
    rows = [line for line in VERSIONS.splitlines() if line.startswith("| 0.")]
    assert [line.split("|")[1].strip() for line in rows] == list(SUPPORTED)
