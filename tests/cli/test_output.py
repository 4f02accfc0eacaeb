"""Where the commands print and write: one line for what cannot be written to; only regular files are replaced."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.cli import benchmark_command, estimate_command, plan_command
from megatron.zero_bubble.cli.output import percent
from tests.mistakes import one_line_mistake

TOOL = [sys.executable, "-m", "megatron.zero_bubble.cli", "schedule"]
CURVE = ["memory-curve", "--pipeline-size", "2", "--num-microbatches", "2"]


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A device like /dev/full, and not the machine's own."""
    path = tmp_path / "full"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"this user, or this file system, may have no devices: {error}")
    return path


def run(*words: object, **options: object) -> tuple[int, str]:
    """Run the command; return its exit status and what it wrote to stderr."""
    result = subprocess.run([*TOOL, *map(str, words)], stderr=subprocess.PIPE, text=True, check=False, **options)
    return result.returncode, result.stderr


def test_a_full_disk_costs_one_line(full):
    assert run("list", "--output", full) == (
        2,
        f"zero-bubble schedule list: error: cannot write {full}: No space left on device\n",
    )
    with full.open("w") as out:
        line = "zero-bubble schedule list: error: cannot write to the standard output: No space left on device\n"
        assert run("list", stdout=out) == (2, line)
    assert full.is_char_device()


PLAN = ["--costs", "none.json", "--pipeline-size", "4", "--num-microbatches", "8"]


@pytest.mark.parametrize(
    ("command", "required"),
    [(benchmark_command, []), (estimate_command, ["--world-size", "8"]), (plan_command, PLAN)],
    ids=["benchmark", "estimate", "plan"],
)
def test_an_output_in_no_folder_is_refused_before_anything_is_computed(command, required, tmp_path, capsys):
    line = one_line_mistake(command.main, [*required, "--output", str(tmp_path / "none" / "file")], capsys)
    assert line.endswith(f"error: argument --output: {tmp_path / 'none'} is not a folder\n")


def test_a_reader_that_has_seen_enough_costs_no_line():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        assert run("list", stdout=closed) == (0, "")
        assert run(*CURVE, stdout=closed) == (0, "")


@pytest.mark.parametrize(
    ("words", "prog"),
    [(["--help"], ""), (["schedule", "--help"], " schedule"), (["schedule", "list", "--help"], " schedule list")],
)
def test_help_is_written_or_costs_one_line(full, words, prog):
    command = [*TOOL[:-1], *words]
    with full.open("w") as out:
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    line = f"zero-bubble{prog}: error: cannot write to the standard output: No space left on device\n"
    assert (result.returncode, result.stderr) == (2, line)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_file_whose_reader_went_away_was_not_written(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    output = f"/dev/fd/{writer}"
    line = f"zero-bubble schedule list: error: cannot write {output}: Broken pipe\n"
    assert run("list", "--output", output, pass_fds=[writer]) == (2, line)
    os.close(writer)


def test_a_closed_standard_output_costs_one_line():
    code = "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
    line = "zero-bubble schedule list: error: cannot write to the standard output: Bad file descriptor\n"
    result = subprocess.run([sys.executable, "-c", code, *TOOL, "list"], stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, line)


def test_a_picture_goes_where_a_link_leads(tmp_path):
    link = tmp_path / "curve.svg"
    link.symlink_to(tmp_path / "elsewhere.svg")
    for _ in range(2):
        assert run(*CURVE, "--output", link, stdout=subprocess.DEVNULL) == (0, "")
        assert link.is_symlink()
    assert (tmp_path / "elsewhere.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("fraction", "text"), [(-1e-16, "0.00%"), (-0.00004, "0.00%"), (-0.0006, "-0.06%"), (0.12345, "12.35%")]
)
def test_a_percentage_that_rounds_to_zero_has_no_sign(fraction, text):
    assert percent(fraction) == text
