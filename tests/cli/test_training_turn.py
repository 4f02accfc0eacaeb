"""The times, memory and layout of a training are read from its log, and a training that fails says why in one line."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.benchmark.training_turn import Turn, read_log, take_turn
from megatron.zero_bubble.schedule import Idle

LOG = """ > zero-bubble plan; times measured up to step 6, spread 1.0%
     predicted: idle 14.00% (imbalance 4.00%, bubble rate 10.00%), 88.5 ms, 1.060 times as fast as 1F1B
 [2026-11-20 20:01:12.2] iteration        5/     20 | consumed samples:          160 | elapsed time per iteration (ms): 900.0 | learning rate: 1.0E-03 | idle: 53.00% | imbalance: 3.00% | bubble rate: 50.00% |
 [2026-11-20 20:01:12.3] iteration       10/     20 | consumed samples:          320 | elapsed time per iteration (ms): 500.0 | learning rate: 1.0E-03 | idle: 44.00% | imbalance: 4.00% | bubble rate: 40.00% | predicted: 10.00% |
[Rank 1] (after 20 iterations) memory (MB) | allocated: 1.00 | max allocated: 30.00 | reserved: 64.00 | max reserved: 64.00
[Rank 0] (after 20 iterations) memory (MB) | allocated: 1.00 | max allocated: 20.00 | reserved: 64.00 | max reserved: 64.00
 [2026-11-20 20:01:12.4] iteration       15/     20 | consumed samples:          480 | elapsed time per iteration (ms): 100.0 | learning rate: 1.0E-03 | idle: 17.50% | imbalance: 5.00% | bubble rate: 12.50% | predicted: 11.00% |
 [2026-11-20 20:01:12.5] iteration       20/     20 | consumed samples:          640 | elapsed time per iteration (ms): 110.5 | learning rate: 1.0E-03 | idle: 19.50% | imbalance: 6.00% | bubble rate: 13.50% | predicted: 11.00% |
"""  # noqa: E501


def test_a_log_is_read_after_its_warmup():
    turn = read_log(LOG, warmup=10, resident_bytes=1.0)
    idle = (Idle(0.05, 0.125), Idle(0.06, 0.135))
    assert turn == Turn((100.0, 110.5), idle, 0.11, 88.5, 30 * 2**20, is_device_memory=True)


def test_a_logs_summary_has_the_time_in_the_pipeline():
    summary = " > iterations 16 to 20: 105.2 ms each, 92.5 ms of it in the pipeline, 90.1 predicted; bubble rate ...\n"
    turn = read_log(LOG + summary, 10, 1.0)
    assert (turn.pipeline_ms, turn.predicted_ms) == (92.5, 90.1)


@pytest.mark.parametrize(
    ("cells", "layout"),
    [
        ("V                      2 1x6 0", "V 2 1x6 0"),
        ("interleaved, 2 chunks  4x2", "interleaved, 2 chunks 4x2"),
    ],
)
def test_a_log_says_which_layout_was_chosen(cells, layout):
    row = f"     chosen: {cells}        431.7   5.93%  22.83%                71.4\n"
    assert read_log(row + LOG, 10, 1.0).layout == layout


def test_megatron_cores_log_says_nothing_of_bubbles_and_a_cpus_nothing_of_memory():
    text = "\n".join(line.split(" | idle")[0] for line in LOG.splitlines() if "iteration  " in line)
    assert read_log(text, 10, 7.0) == Turn((100.0, 110.5), (), None, None, 7.0)


def test_a_log_without_measured_iterations_is_an_error():
    with pytest.raises(RuntimeError, match="no iteration after its warmup"):
        read_log(LOG, warmup=20, resident_bytes=1.0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('pretrain_gpt.py: error: --lr is wrong'); raise SystemExit(2)", "^--lr is wrong$"),
        ("raise KeyError('lost')", "KeyError: 'lost'"),
        ("raise SystemExit(5)", "status 5"),
        ("import time; time.sleep(60)", "ended because it was not done within --timeout 1 s"),
    ],
)
def test_a_training_that_fails_says_why_in_one_line(program, reason):
    with pytest.raises(RuntimeError, match=reason) as caught:
        take_turn([sys.executable, "-c", program], {}, 0, timeout=1 if "sleep" in program else 60)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has ended")
def test_a_training_ends_with_a_killed_benchmark(tmp_path):
    """torchrun ends its ranks when it gets SIGTERM."""
    places = started, ended = tmp_path / "started", tmp_path / "ended"
    training = (
        "import pathlib, signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[2]).touch(), sys.exit())); "
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    command = [sys.executable, "-c", training, *map(str, places)]
    turn = f"from {take_turn.__module__} import take_turn; take_turn({command}, {{}}, 0, timeout=60)"
    benchmark = subprocess.Popen([sys.executable, "-c", turn])
    wait_for(started)
    benchmark.kill()
    benchmark.wait()
    wait_for(ended)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} is missing"
        time.sleep(0.05)
