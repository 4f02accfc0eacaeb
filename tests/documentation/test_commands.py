"""Runs the commands of README.md and docs/*.md as they stand there: `make docs-check`, in some minutes."""

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
from tests.documentation_commands import SHORTER, Command, commands
from tests.launch import ROOT


def marks_of(command: Command) -> list[pytest.MarkDecorator]:
    """Commands that write to the repository run one after the other."""
    skip = [pytest.mark.skip(reason=command.reason_to_skip)] if command.reason_to_skip else []
    return skip if command.is_of_the_package else [*skip, pytest.mark.xdist_group("repository")]


CASES = [pytest.param(command, id=f"{command.page}:{command.line}", marks=marks_of(command)) for command in commands()]


@pytest.mark.parametrize("command", CASES)
def test_the_command_works(command: Command, tmp_path: Path) -> None:
    """Ours run in a folder with a profile and costs, and may write to its docs/; the others run in the repository.

    Those that train for minutes get flags of `SHORTER` as well.
    """
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "units.json", tmp_path / "docs")
    shutil.copytree(ROOT / "examples" / "costs", tmp_path / "examples" / "costs")
    profile = Profile(Placement("v", 4, 2), StageCosts.uniform(8, 20, 20, 20), 0.0, {})
    (tmp_path / "profile.json").write_text(profile_to_json(profile))
    python = shlex.quote(sys.executable)
    text = re.sub("^zero-bubble ", f"{python} -m megatron.zero_bubble.cli ", command.text)
    text = re.sub("^python ", f"{python} ", text)
    text = re.sub("^torchrun ", f"{python} -m torch.distributed.run ", text)
    if command.text in SHORTER:
        text = f"{text} FLAGS='{SHORTER[command.text]}'"
    folder = tmp_path if command.is_of_the_package else ROOT
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
