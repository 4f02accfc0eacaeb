"""A user's mistake: one line that names the flag and the value, a non-zero exit, no traceback of ours, no hang.

Two jobs show how torchrun ends: after a mistake that the ranks find before they meet, and after one that they find
later. All other mistakes end in the same way, so that only their lines are tested, in ranks that are there already.

All is exhaustive: `tests/session/test_start_up.py` tests how a rank ends, the tests of each module its lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.zero_bubble.planner import names
from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json
from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from tests.changes import Change, Run, tell_and_clear_up
from tests.launch import PRETRAIN, TINY_GPT, run
from tests.ranks import be_rank, run_on_ranks
from tests.trainings import run_trainings

pytestmark = pytest.mark.exhaustive

GPT = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4"]
BASE = [*GPT, "--zero-bubble"]


def errors_of(*flags: str) -> list[str]:
    """The lines in which `pretrain_gpt.py` complains, having ended by itself with an error."""
    result = run(2, PRETRAIN, *flags)
    assert result.returncode != 0, result.stdout
    assert " iteration " not in result.stdout, "it trained: " + result.stdout
    assert 'pretrain_gpt.py", line' not in result.stderr, "a traceback: " + result.stderr
    lines = re.findall(r"^pretrain_gpt\.py: error: (.*)", result.stderr, flags=re.MULTILINE)
    assert re.findall(r"traceback : pretrain_gpt\.py: error: (.*)", result.stderr) == lines, (
        "torchrun's summary differs"
    )
    return lines


def test_a_mistake_that_is_found_before_the_ranks_meet() -> None:
    (line,) = errors_of(*BASE, "--zero-bubble-schedule", "zb-h3")
    assert "--zero-bubble-schedule zb-h3" in line
    assert all(name in line for name in names())


def test_a_mistake_that_is_found_after_the_ranks_have_met() -> None:
    """megatron-core refuses the model's configuration."""
    (line,) = errors_of(*BASE, "--recompute-granularity", "selective", "--recompute-num-layers", "1")
    assert line.startswith("megatron-core refuses this model: ")


class Refused(Change):
    """The training ends by a mistake of its user. Each line that a rank has for it is printed."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            tell_and_clear_up(error)


def line_of(printed: str) -> str:
    """The one line that all ranks have for a mistake that is found before the first iteration."""
    assert " iteration " not in printed, "it trained: " + printed
    (line,) = re.findall(r"^ended: (.*)", printed, flags=re.MULTILINE)
    return line


def refusal(folder: Path, *flags: str) -> str:
    return line_of(run_trainings(2, {"refused": [*flags, Refused()]}, folder, unlogged=["refused"])["refused"])


def test_missing_data_is_named_with_its_flag(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert f"--valid-data-path: no such file: {missing}.idx" in refusal(
        tmp_path, *BASE, "--valid-data-path", str(missing)
    )


def test_a_limit_in_bytes_under_the_smallest_possible(tmp_path: Path) -> None:
    """A limit in bytes can be checked once costs are measured: here they come from a profile."""
    _, job = complete_and_check(parse_arguments(BASE), {"WORLD_SIZE": "2"}, has_cuda=False)
    costs = StageCosts.uniform(2, memory_f=2000, memory_b=-500, memory_w=-1500)
    file = tmp_path / "profile.json"
    file.write_text(profile_to_json(Profile(Placement("linear", 2), costs, 0.0, job.flags.model)))
    limited = ("--zero-bubble-profile-input", str(file), "--zero-bubble-memory-limit", "1KB")
    assert refusal(tmp_path, *BASE, "--zero-bubble-keep-layout", *limited) == (
        "--zero-bubble-memory-limit 1KB: schedule auto does not fit in the memory limit of 1000 bytes: "
        "the smallest that works is 2000B"
    )


def test_a_full_disk_under_the_log_of_numbers(tmp_path: Path) -> None:
    """All ranks end, although only the rank with the loss writes the file."""
    full = [*BASE, "--log-numerics", "/dev/full", Refused()]
    printed = run_trainings(2, {"full": full}, tmp_path, unlogged=["full"])["full"]
    (line,) = re.findall(r"^ended: (.*)", printed, flags=re.MULTILINE)
    assert line == "--log-numerics /dev/full: cannot be written: No space left on device"


def test_a_full_disk_under_the_profile() -> None:
    """Rank 0 alone writes the profile, after the measured iterations."""
    measured = ("--zero-bubble-keep-layout", "--zero-bubble-profile-iters", "2", "3")
    result = run(2, PRETRAIN, *BASE, *measured, "--zero-bubble-profile-output", "/dev/full")
    assert 'pretrain_gpt.py", line' not in result.stderr, "a traceback: " + result.stderr
    lines = re.findall(r"^pretrain_gpt\.py: error: (.*)", result.stderr, flags=re.MULTILINE)
    assert lines == ["--zero-bubble-profile-output /dev/full: cannot be written: No space left on device"]
    assert result.returncode != 0


def meet(rank: int, num_ranks: int, port: int) -> None:
    """Be the first of two ranks, which opens the port where they meet."""
    be_rank(rank, 2)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    from megatron.zero_bubble.trainer.initialize import initialized

    args, job = complete_and_check(parse_arguments(BASE), os.environ, has_cuda=False)
    place = rf"MASTER_ADDR=localhost MASTER_PORT={port} RANK=0 WORLD_SIZE=[12] \(torchrun sets these\)"
    line = rf"^{place}: ranks cannot meet: [^\n]*address already in use$"
    with pytest.raises(ValueError, match=line), initialized(args, job.placement):
        pass


def test_a_port_that_is_in_use() -> None:
    """Rank 0 opens the port itself where no torchrun starts it, as under `srun`."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        assert run_on_ranks(1, meet, (server.getsockname()[1],), timeout=100) == 0


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert f"--load {tmp_path}" in refusal(tmp_path, *BASE, "--load", str(tmp_path))


def test_layers_for_further_tokens_that_are_not_beside_the_loss(tmp_path: Path) -> None:
    line = refusal(tmp_path, *GPT, "--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "Ettttm|L")
    assert line == (
        "megatron-core refuses this model: the layers of --mtp-num-layers must be on the last stage, beside the loss"
    )


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    load, one = ("--load", str(folder)), ("--train-iters", "1")
    trainings = {
        "saved": [*BASE, *one, "--save", str(folder)],
        "again": [*BASE, *one, *load],
        "another length": [*BASE, "--train-iters", "2", *load, Refused()],
        "another size": [*BASE, "--hidden-size", "64", *load, Refused()],
    }
    printed = run_trainings(2, trainings, tmp_path, unlogged=trainings)
    assert "nothing to train" not in printed["saved"]
    said = f" > nothing to train: the checkpoint in --load {folder} is of iteration 1, --train-iters is 1\n"
    assert said in printed["again"]
    line = line_of(printed["another length"])
    assert f"--load {folder}" in line
    assert "--override-opt-param-scheduler" in line
    line = line_of(printed["another size"])
    assert "--hidden-size 64" in line
    assert "32" in line
