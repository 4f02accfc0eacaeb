"""The scripts behind `make pretrain` and `make compare` start what they say, on any number of cores."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from tests.launch import ROOT


def started(script: str, folder: Path, **environment: str) -> list[str]:
    """The words of the command that a script ends with, which is not run."""
    for name in ("torchrun", "python"):
        program = folder / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        program.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [str(ROOT / "examples" / script), "--seed", "7"],
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


@pytest.mark.parametrize(("given", "num_ranks"), [({}, None), ({"PIPELINE_SIZE": "2"}, 2), ({"PIPELINE_SIZE": "8"}, 8)])
def test_the_sample_is_trained_on_as_many_ranks(given: dict[str, str], num_ranks: int | None, tmp_path: Path) -> None:
    progress, *words = started("pretrain_sample.sh", tmp_path, **given)
    assert words[:2] == ["--standalone", "--nproc-per-node"]
    ranks = int(words[2])
    cores = len(os.sched_getaffinity(0))
    assert ranks == num_ranks or (num_ranks is None and (2 <= ranks <= max(2, cores) or cores < 2))
    assert progress.startswith(f"starting {ranks} pipeline ranks")
    parsed = parse_arguments(words[words.index("pretrain_gpt.py") + 1 :])
    args, job = complete_and_check(parsed, {"WORLD_SIZE": str(ranks)}, has_cuda=False, for_this_machine=False)
    assert job.is_layout_open
    assert args.seed == 7


def test_the_comparison_has_the_same_model(tmp_path: Path) -> None:
    _, *trained = started("pretrain_sample.sh", tmp_path)
    compared = started("compare_sample.sh", tmp_path)
    own, shared = compared[: compared.index("--")], compared[compared.index("--") + 1 :]
    assert "--losses" in own
    assert own[-2:] == ["--seed", "7"]
    assert " ".join(shared[: shared.index("--micro-batch-size")]) in " ".join(trained)
