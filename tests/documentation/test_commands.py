"""Runs the commands of README.md and docs/*.md as they stand there: `make docs-check`, in about ten minutes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    """Commands of make run in the repository; others in an empty folder, where they may write drawings to docs/."""
    (tmp_path / "docs").mkdir()
    folder = ROOT if command.text.startswith("make ") else tmp_path
    program = f"{shlex.quote(sys.executable)} -m megatron.zero_bubble.cli"
    text = command.text.replace("zero-bubble ", f"{program} ", 1) if folder is tmp_path else command.text
    result = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, f"{command.text}\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
