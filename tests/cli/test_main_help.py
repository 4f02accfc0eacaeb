"""`zero-bubble` itself: its help, and how fast it is there."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress

import pytest

from megatron.zero_bubble.cli import __main__
from megatron.zero_bubble.cli.__main__ import main
from tests.test_architecture import ROOT


def test_commands_that_need_no_torch_import_none():
    for words in (["--help"], ["schedule", "list"], ["estimate", "--help"], ["benchmark", "--help"]):
        code = (
            "import sys\nfrom megatron.zero_bubble.cli.__main__ import main\n"
            f"try: main({words!r})\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
        )
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "False", words


def test_help_names_every_command_with_an_example(capsys):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for name in ("schedule", "estimate", "benchmark", "check"):
        assert page.count(f"\n  zero-bubble {name}") == 1


def test_the_version_is_the_version_of_the_project(capsys):
    assert main(["--version"]) == 0
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert capsys.readouterr().out == f"megatron-zero-bubble {version}\n"


@pytest.mark.parametrize("command", ["plan", "estimate", "benchmark", "check", "playground", "schedule compare"])
def test_help_shows_defaults_as_they_are_written_on_a_command_line(command, capsys):
    with suppress(SystemExit):
        main([*command.split(), "--help"])
    page = " ".join(capsys.readouterr().out.split())
    assert "(default: " in page
    assert re.findall(r"\(default: \w+\(", page) == []


@pytest.mark.parametrize(("words", "line"), [(["paint"], "'paint' is not one of schedule, "), (["--all"], "'--all'")])
def test_an_unknown_command_is_one_line(words, line, capsys):
    assert main(words) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith("zero-bubble: error: ")
    assert line in errors


def test_an_interrupted_import_costs_no_traceback(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "import_module", interrupted)
    assert main(["schedule", "list"]) == 130
    assert capsys.readouterr() == ("", "")
