"""A checkpoint that is damaged, malicious or cannot be written: one line, the same on every rank, and no rank waits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.zero_bubble.trainer.checkpoint_files import tracked
from tests.damaged_checkpoints import DAMAGES, FILES, marker_of
from tests.launch import ROOT, TINY_GPT, run_script

FLAGS = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4"]
CODE = "it names posix.mkdir, which does not belong in a checkpoint and could run code"
LINES = {
    "none": None,
    "missing metadata.json": ", which latest_checkpointed_iteration.txt names, is incomplete: metadata.json is missing",
    "missing __1_0.distcp": "__1_0.distcp is missing, expected N bytes",
    "half of __1_0.distcp": "__1_0.distcp has N bytes, expected at least N",
    "another model's part": "lacks decoder.final_layernorm.weight of the model or optimizer that the flags ask for",
    "a further part": "has decoder.final_layernorm.weights, which the model that the flags ask for lacks",
    "no flags": "common.pt has no 'args'",
    "no schedule": "common.pt has no 'opt_param_scheduler'",
    "evil .metadata": f".metadata cannot be read: {CODE}",
    "evil common.pt": f"common.pt cannot be read: {CODE}",
    "evil object": f"__1_0.distcp cannot be read: {CODE}",
    "evil tensor": f"__1_0.distcp cannot be read: {CODE}",
    "evil older extra state": f"__0_0.distcp cannot be read: {CODE}",
    "evil extra state": (
        "__0_0.distcp cannot be read: decoder.layers.mlp.linear_fc1._extra_state/shard_0_4 is FP8 state, "
        "which Transformer Engine would unpickle without protection"
    ),
}
"""What is said of each damage, as a regular expression; N stands for a number."""
for name in FILES:
    LINES.setdefault(f"missing {name}", f"{name} is missing")
    LINES.setdefault(f"half of {name}", f"{name} cannot be read: .*")
    LINES.setdefault(f"{name} overwritten", f"{name} cannot be read: .*")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def output(root: Path) -> str:
    """The output of a job of two ranks that tries every damage and every fault."""
    return run_script(2, ROOT / "tests" / "damaged_checkpoints.py", root, str(root), *FLAGS)


@pytest.fixture(scope="module")
def outcomes(output: str) -> dict[str, list]:
    return dict(json.loads(line) for line in output.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_one_line_on_all_ranks(root: Path, outcomes: dict[str, list], name: str) -> None:
    first, second = outcomes[name]
    assert first == second
    expected = LINES[name]
    if expected is None:
        assert first is None
        return
    pattern = re.sub(r"\bN\b", r"[0-9]+", expected)
    place = re.escape(f"--load {root / name}: iter_0000001")
    assert re.fullmatch(place + (pattern if expected[0] == "," else f": {pattern}"), first), first


def test_nothing_in_a_checkpoint_runs_code(root: Path, outcomes: dict[str, list]) -> None:
    evil = [name for name in DAMAGES if name.startswith("evil")]
    assert len(evil) == 6
    assert not [name for name in evil if marker_of(root / name / "iter_0000001").exists()]


DISK_FAULTS = ("long files", "long files on rank 1", "common.pt", ".metadata", "metadata.json")


@pytest.mark.parametrize("name", [*DISK_FAULTS, "folder", "fsync"])
def test_a_full_disk_is_one_line_and_leaves_the_latest(root: Path, outcomes: dict[str, list], name: str) -> None:
    reason = "a write failed, as on a full disk" if name.startswith("long") else "No space left on device"
    line = f"--save {root / 'good'}: iteration 2 cannot be saved: {reason} (latest there: 1)"
    assert outcomes[f"disk: {name}"] == [line, line]
    assert outcomes[f"left by {name}"] == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_the_job_could_go_on_saving(outcomes: dict[str, list]) -> None:
    assert outcomes["save again"] == [None, None]


def test_where_nothing_was_saved_before_there_is_no_latest(tmp_path: Path) -> None:
    """`test_endings.py` ends a training by such a line."""
    assert tracked(tmp_path) == "none"
