"""The trainings that a check starts: their environment, their end, and the trainings after one that fails."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from megatron.zero_bubble.cli.check.rank_jobs import Backend, Ended, RankStart


def test_ranks_share_the_first_device_and_have_what_nccl_needs_for_that(monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    nccl, one_queue = Backend("nccl").environment(), Backend("nccl", one_queue=True).environment()
    assert nccl["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert nccl["NCCL_MAX_CTAS"] == "8", "what the user has set"
    assert (nccl["CUDA_DEVICE_MAX_CONNECTIONS"], one_queue["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("32", "1")
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in Backend("host").environment()


RANK = """
import json, os, sys, time
from pathlib import Path

assert os.environ["LOCAL_RANK"] == "0"
plan = Path(sys.argv[1])
if os.environ.get("BROKEN"):
    sys.exit("ModuleNotFoundError: No module named 'yaml'")
for title, what in json.loads(plan.read_text())["trainings"].items():
    def note(word):
        if os.environ["RANK"] == "0":
            with open(plan.parent / "progress.jsonl", "a") as file:
                file.write(json.dumps([word, title, time.time()]) + "\\n")
    note("begins")
    if what == ["fail"] and os.environ["RANK"] == "1":
        raise RuntimeError("no such kernel")
    if what:
        Path(plan.parents[1] / f"{os.getpid()}.pid").touch()
        time.sleep(600)
    time.sleep(0.1)
    note("ends")
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts two ranks that do what the flags of a training say."""
    package = tmp_path / "fake"
    package.mkdir()
    (package / "fake_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(package))

    def start(trainings: dict[str, Any], time_limit: float) -> dict[str, Ended]:
        (tmp_path / "jobs").mkdir()
        ranks = RankStart(Backend("gloo"), 2, tmp_path / "jobs", time_limit, "fake_rank")
        return ranks.run(trainings)

    return start


@pytest.mark.exhaustive  # two trainings, of which one hangs until it is ended
def test_a_training_that_fails_or_hangs_does_not_stop_those_after_it(start, tmp_path):
    trainings = {"first": None, "failing": ["fail"], "second": None, "hanging": ["hang"], "third": None}
    started = time.monotonic()
    ended = start(trainings, 3.0)
    assert time.monotonic() - started < 60
    assert list(ended) == list(trainings)
    assert [one.error for one in ended.values()] == [
        None,
        "RuntimeError: no such kernel",
        None,
        "ended because it was not done within 3 s",
        None,
    ]
    assert "rank 1:\nTraceback" in ended["failing"].log
    assert 0 < ended["first"].seconds < 3 < ended["hanging"].seconds
    pids = [int(path.stem) for path in (tmp_path / "jobs").glob("*.pid")]
    assert len(pids) >= 2
    assert not any(psutil.pid_exists(pid) for pid in pids), "no rank is left"


def test_ranks_that_cannot_begin_are_not_started_again_and_again(start, monkeypatch):
    monkeypatch.setenv("BROKEN", "1")
    ended = start({"first": None, "second": None}, 3.0)
    assert {one.error for one in ended.values()} == {"ModuleNotFoundError: No module named 'yaml'"}
    assert len(ended) == 2
