"""Runs the commands of README.md and docs/*.md as they stand there: `make docs-check`, in about ten minutes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json
from tests.documentation_commands import Command, commands
from tests.launch import ROOT

CASES = [
    pytest.param(
        command,
        id=f"{command.page}:{command.line}",
        marks=pytest.mark.skip(reason=command.reason_to_skip) if command.reason_to_skip else (),
    )
    for command in commands()
]


@pytest.mark.parametrize("command", CASES)
def test_the_command_works(command: Command, tmp_path: Path) -> None:
    """Ours run in a folder with a profile and costs, and may write to its docs/; the others run in the repository."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "units.json", tmp_path / "docs")
    profile = Profile(Placement("v", 4, 2), StageCosts.uniform(8, 20, 20, 20), 0.0, {})
    (tmp_path / "profile.json").write_text(profile_to_json(profile))
    python = shlex.quote(sys.executable)
    text = re.sub("^zero-bubble ", f"{python} -m megatron.zero_bubble.cli ", command.text)
    text = re.sub("^python ", f"{python} ", text)
    folder = tmp_path if command.text.startswith("zero-bubble ") else ROOT
    # Flags of `make docs-check` itself are not those of a command of make that it runs.
    variables = {
        name: value for name, value in os.environ.items() if name not in ("FLAGS", "MAKEFLAGS", "MAKEOVERRIDES")
    }
    result = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, f"{command.text}\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
