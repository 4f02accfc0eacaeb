"""A user's mistake: one line that names the flag and the value, a non-zero exit, no traceback of ours, no hang.

`make test` starts ranks for a mistake that is found before they meet and for one that is found after; the others end
the same ways, and their messages are tested where they are made.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json
from megatron.zero_bubble.training.arguments import parse_arguments
from megatron.zero_bubble.training.checks import complete_and_check
from tests.launch import PRETRAIN, TINY_GPT, environment, run

BASE = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--zero-bubble"]
REAL_DATA = [flag for flag in BASE if flag != "--mock-data"]


def errors_of(*flags: str) -> list[str]:
    """The lines in which `pretrain_gpt.py` complains, having ended by itself with an error."""
    result = run(2, PRETRAIN, *flags, timeout=120)
    assert result.returncode != 0, result.stdout
    assert " iteration " not in result.stdout, "it trained: " + result.stdout
    assert 'pretrain_gpt.py", line' not in result.stderr, "a traceback: " + result.stderr
    lines = re.findall(r"^pretrain_gpt\.py: error: (.*)", result.stderr, flags=re.MULTILINE)
    assert re.findall(r"traceback : pretrain_gpt\.py: error: (.*)", result.stderr) == lines, (
        "torchrun's summary differs"
    )
    return lines


@pytest.mark.exhaustive  # the line itself is in test_flag_mistakes.py, how torchrun repeats it in the tests below
def test_an_unknown_schedule_is_answered_with_the_known_ones() -> None:
    (line,) = errors_of(*BASE, "--zero-bubble-schedule", "zb-h3")
    assert "--zero-bubble-schedule zb-h3" in line
    assert all(name in line for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"))


@pytest.mark.exhaustive
def test_missing_data_is_named_with_its_flag(tmp_path: Path) -> None:
    (line,) = errors_of(*REAL_DATA, "--tokenizer-type", "NullTokenizer", "--data-path", str(tmp_path / "nothing"))
    assert "--data-path" in line
    assert str(tmp_path / "nothing") in line


@pytest.mark.exhaustive  # test_planning_flags.py has the line, the tests below how torchrun repeats it
def test_a_limit_in_bytes_under_the_smallest_possible(tmp_path: Path) -> None:
    """A limit in bytes can be checked once costs are measured: here they come from a profile."""
    _, job = complete_and_check(parse_arguments(BASE), {"WORLD_SIZE": "2"}, has_cuda=False)
    costs = StageCosts.uniform(2, memory_f=2000, memory_b=-500, memory_w=-1500)
    file = tmp_path / "profile.json"
    file.write_text(profile_to_json(Profile(Placement("linear", 2), costs, 0.0, job.flags.model)))
    kept = (*BASE, "--zero-bubble-keep-layout")
    (line,) = errors_of(*kept, "--zero-bubble-profile-input", str(file), "--zero-bubble-memory-limit", "1KB")
    assert line == (
        "--zero-bubble-memory-limit 1KB: schedule auto does not fit in the memory limit of 1000 bytes: "
        "the smallest that works is 2000"
    )


@pytest.mark.exhaustive
def test_a_full_disk_under_the_log_of_numbers() -> None:
    """All ranks end, although only the rank with the loss writes the file."""
    result = run(2, PRETRAIN, *BASE, "--log-numerics", "/dev/full")
    assert result.returncode != 0
    (line,) = re.findall(r"^pretrain_gpt\.py: error: (.*)", result.stderr, flags=re.MULTILINE)
    assert line == "--log-numerics /dev/full cannot be written: No space left on device"


@pytest.mark.exhaustive
def test_a_port_that_is_in_use() -> None:
    """Rank 0 opens the port itself where no torchrun starts it, as under `srun`."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = str(server.getsockname()[1])
        rank_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        command = [sys.executable, str(PRETRAIN), *BASE]
        result = subprocess.run(
            command, env=environment() | rank_0, capture_output=True, text=True, timeout=100, check=False
        )
    assert result.returncode == 2
    (line,) = re.findall(r"pretrain_gpt\.py: error: (.*)", result.stderr)
    assert line.startswith(f"MASTER_ADDR=localhost MASTER_PORT={port}: ranks cannot meet: ")
    assert line.endswith("address already in use")


@pytest.mark.exhaustive
def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    (line,) = errors_of(*BASE, "--load", str(tmp_path))
    assert f"--load {tmp_path}" in line


@pytest.mark.exhaustive
def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    saved = run(2, PRETRAIN, *BASE, "--train-iters", "1", "--save", str(tmp_path))
    assert saved.returncode == 0, saved.stderr
    assert "nothing to train" not in saved.stdout
    again = run(2, PRETRAIN, *BASE, "--train-iters", "1", "--load", str(tmp_path))
    assert again.returncode == 0, again.stderr
    said = f" > nothing to train: the checkpoint in --load {tmp_path} is of iteration 1, --train-iters is 1\n"
    assert said in again.stdout
    (line,) = errors_of(*BASE, "--train-iters", "2", "--load", str(tmp_path))
    assert f"--load {tmp_path}" in line
    assert "--override-opt-param-scheduler" in line
    (line,) = errors_of(*BASE, "--hidden-size", "64", "--load", str(tmp_path))
    assert "--hidden-size 64" in line
    assert "32" in line
