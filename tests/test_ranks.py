"""The ranks that tests share: a training leaves nothing behind for the next, and a rank that fails ends all."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.changes import InfiniteGradient, KilledRank, NcclRules, RecordedCollectives, WarmedUp
from tests.launch import TINY_GPT
from tests.ranks import Ranks, run_on_ranks
from tests.trainings import run_trainings

COMMON = [
    *(*TINY_GPT, "--global-batch-size", "4", "--train-iters", "4", "--pipeline-model-parallel-size", "2"),
    *("--num-workers", "2"),
]
H1 = ("--zero-bubble-schedule", "zb-h1")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
OTHERS = {
    "V with shards of the vocabulary": ("--zero-bubble-schedule", "zb-v", "--zero-bubble-vocabulary-parallel"),
    "undone steps": (
        *("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation", "--clip-grad", "0.3", "--fp16"),
        *("--initial-loss-scale", "65536", InfiniteGradient(2, rank=1)),
    ),
    "chosen layout": ("--zero-bubble", "--zero-bubble-seed-by-layer"),
    "warmed up, by NCCL's rules": (*H1, "--bf16", WarmedUp(), NcclRules(0), RecordedCollectives()),
    # The dispatchers keep tensors of the last microbatch, whose graph holds the hooks of DDP.
    "experts": (*H1, "--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"),
}
"""Trainings that change as much as they can in their processes."""
REPLICATED = {
    "sharded by FSDP2": (*H1, "--use-torch-fsdp2", "--untie-embeddings-and-output-weights"),
    "overlapped, distributed optimizer": (*H1, *OVERLAP),
    "hierarchical SGD": (*H1, "--hierarchical-sgd", "2:2", "--optimizer", "sgd"),
}
"""Such trainings of two replicas."""


STAYS = ("globals", "environment", "default group", "type", "python threads", "signals")
OPEN = ("threads", "open files")


def state_of_process() -> dict[str, object]:
    """State that a training could leave to the next: global variables, threads, files, settings of torch."""
    from megatron.core import num_microbatches_calculator, parallel_state

    left = {}
    for module in (parallel_state, num_microbatches_calculator):
        left |= {f"{module.__name__}.{name}": repr(value) for name, value in vars(module).items() if name[:2] == "_G"}
    functions = {
        f"{name}.{attribute}": id(value)
        for name, module in list(sys.modules.items())
        if name.startswith(("megatron.", "torch.distributed")) and "tokenizers" not in name
        for attribute, value in list(vars(module).items())
        if callable(value)
    }
    return {
        "globals": left,
        "functions": functions,
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "default group": dist.is_initialized(),
        "type": torch.get_default_dtype(),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": sorted(thread.name for thread in threading.enumerate()),
        "open files": len(os.listdir("/proc/self/fd")),
        "signals": [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
    }


def write_state(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    (folder / f"{name}.{rank}").write_text(json.dumps(state_of_process(), default=str))


def states(num_ranks: int, folder: Path, name: str) -> list[dict[str, object]]:
    assert run_on_ranks(num_ranks, write_state, (folder, name), timeout=60) == 0
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(num_ranks)]


def changed_functions(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    """Names of modules that mean another function than before."""
    functions, known = found["functions"], expected["functions"]
    assert isinstance(functions, dict)
    assert isinstance(known, dict)
    return [name for name in known if functions.get(name) != known[name]]


@pytest.mark.parametrize(
    ("num_ranks", "others"),
    [
        pytest.param(2, OTHERS, id="a pipeline"),
        pytest.param(4, REPLICATED, id="two replicas", marks=pytest.mark.exhaustive),  # the same loop, twice as long
    ],
)
def test_a_training_leaves_nothing_behind(num_ranks: int, others: dict[str, tuple], tmp_path: Path) -> None:
    """A training has the same numbers before and after others, and each leaves its processes as it found them.

    Each runs twice: libraries start some threads of their own when they are first used.
    """
    plain = [*COMMON, *H1]
    run_trainings(num_ranks, {"first": plain}, tmp_path)
    before = states(num_ranks, tmp_path, "before")
    for turn in ("first", "second"):
        for name, words in others.items():
            run_trainings(num_ranks, {f"{name}, {turn} time": [*COMMON, *words]}, tmp_path)
            after = states(num_ranks, tmp_path, "after")
            for found, expected in zip(after, before, strict=True):
                assert {key: found[key] for key in STAYS} == {key: expected[key] for key in STAYS}, name
                assert changed_functions(found, expected) == [], name
                if turn == "second":
                    assert {key: found[key] for key in OPEN} == {key: expected[key] for key in OPEN}, name
        before = after
    run_trainings(num_ranks, {"last": plain}, tmp_path)
    assert (tmp_path / "last.jsonl").read_bytes() == (tmp_path / "first.jsonl").read_bytes()


def fail(rank: int, num_ranks: int, failing: int, status: int) -> None:
    """One rank ends with a status, and the others would sleep on."""
    if rank == failing:
        os._exit(status)
    time.sleep(600)


def sleep(rank: int, num_ranks: int, seconds: float) -> None:
    time.sleep(seconds)


def test_a_rank_that_fails_ends_all_and_gives_its_status() -> None:
    ranks = Ranks(3)
    began = time.monotonic()
    assert ranks.run(fail, (1, 7), timeout=300) == 7
    assert time.monotonic() - began < 100
    assert not ranks.are_alive


def test_a_body_that_does_not_end_in_time_is_ended() -> None:
    ranks = Ranks(2)
    assert ranks.run(sleep, (0.0,), timeout=300) == 0
    assert ranks.are_alive
    assert ranks.run(sleep, (600.0,), timeout=0.5) is None
    assert not ranks.are_alive


@pytest.mark.exhaustive
def test_trainings_go_on_in_new_ranks_after_a_rank_was_killed(tmp_path: Path) -> None:
    printed = run_trainings(2, {"killed": [*COMMON, *H1, KilledRank(2, rank=0)]}, tmp_path, status=-signal.SIGKILL)
    assert "iteration        1/" in printed["killed"]
    assert "iteration        2/" not in printed["killed"]
    assert "iteration        4/" in run_trainings(2, {"whole": COMMON}, tmp_path)["whole"]
