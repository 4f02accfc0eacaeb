"""The check of a GPU, tried on a CPU: the same code, at toy size."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.cli.check_command import main
from tests.mistakes import one_line_mistake

ROOT = Path(__file__).parents[2]

TRY = ["--device", "cpu", "--size", "tiny", "--rounds", "1", "--only", "stages"]

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA")


@pytest.fixture(autouse=True)
def _files_go_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@without_cuda
def test_a_stage_is_measured_in_one_process(tmp_path, capsys):
    output = tmp_path / "gpu.json"
    status = main([*TRY, "--output", str(output)])
    findings = json.loads(output.read_text())
    assert capsys.readouterr().out.splitlines()[-1].endswith(str(output))
    assert findings["machine"]["device"] == "CPU"
    assert findings["machine"]["torch"] == torch.__version__
    assert status == (0 if findings["passed"] else 1)
    [stage] = findings["stages"]
    assert all(stage["times_ms"][kind] > 0 for kind in ("F", "B", "W", "BW"))
    times = stage["times_ms"]
    assert stage["b_and_w_over_fused"] == pytest.approx((times["B"] + times["W"]) / times["BW"])
    assert stage["passed"] == (stage["b_and_w_over_fused"] <= 1.03)
    rates = stage["predicted_bubble_rates"]
    assert rates["zb-2p"] <= rates["zb-h1"] < rates["1f1b"]
    memory = stage["memory_bytes"]
    assert memory["F"] + memory["B"] + memory["W"] == pytest.approx(0, abs=1)
    assert stage["expected_memory_bytes"][0] == pytest.approx(memory["F"], rel=0.02)
    assert stage["expected_memory_bytes"][1] == pytest.approx(-memory["W"], rel=0.02)
    assert [check["schedule"] for check in stage["peak_memory"]] == ["1f1b", "zb-h1", "zb-2p"]
    for check in stage["peak_memory"]:
        assert check["measured"] == pytest.approx(check["simulated"], rel=1e-6)


@without_cuda
def test_an_error_leaves_nothing_behind_and_does_not_stop_the_rest(monkeypatch, capsys):
    from megatron.core import parallel_state

    from megatron.zero_bubble.cli.check.rank_check import RankCheck, RankFindings
    from megatron.zero_bubble.cli.check.stage_run import MiddleStage

    def fail(*_: object) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(MiddleStage, "profile", fail)
    monkeypatch.setattr(RankCheck, "run", lambda check, cells: RankFindings([], {}))
    assert main([*TRY, "--only", "ranks"]) == 1
    findings = json.loads(Path("gpu-check.json").read_text())
    assert findings["errors"] == {"stages": "RuntimeError: no step"}
    assert findings["ranks"] == {"refused": {}, "trainings": []}
    assert "stages: ended with an error: RuntimeError: no step" in capsys.readouterr().out
    assert not torch.distributed.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.exhaustive  # the whole check is run by another test
@without_cuda
def test_a_model_without_room_is_named_and_the_others_are_delivered(monkeypatch, capsys):
    from megatron.zero_bubble.cli.check.models import SIZES
    from megatron.zero_bubble.cli.check.stage_run import MiddleStage

    def profile(self: MiddleStage, rounds: int) -> object:
        if self._args.hidden_size > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
        return measure(self, rounds)

    measure, [tiny] = MiddleStage.profile, SIZES["tiny"]
    monkeypatch.setattr(MiddleStage, "profile", profile)
    monkeypatch.setattr("megatron.zero_bubble.cli.check.findings.PRICE_LIMIT", float("inf"))
    monkeypatch.setitem(SIZES, "tiny", (replace(tiny, name="large", hidden_size=128), tiny))
    assert main(TRY) == 1
    findings = json.loads(Path("gpu-check.json").read_text())
    capsys.readouterr()
    assert [stage["model"]["name"] for stage in findings["stages"]] == ["tiny"]
    assert findings["without_room"] == {"large": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    assert findings["stages"][0]["passed"]
    assert not findings["passed"]
    assert main(TRY) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("large")]
    assert line == (
        "large: a stage does not fit on this device, choose another model with --model: "
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert main([*TRY, "--model", "tiny"]) == 0


@without_cuda
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("nowhere/gpu.json", "nowhere is not a folder"),
        ("file/gpu.json", "file is not a folder"),
        ("folder", "folder is a folder; name a file"),
        ("locked/gpu.json", "no permission to write to"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    output, words, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    for name in ("folder", "locked"):
        (tmp_path / name).mkdir()
    access = os.access
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode))
    status = main([*TRY, "--output", str(tmp_path / output)])
    printed, errors = capsys.readouterr()
    assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("zero-bubble check: error: argument --output: ")
    assert words in errors


def test_transformer_engine_that_is_not_installed_is_one_line(monkeypatch, capsys):
    def no_version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megatron.zero_bubble.mcore.transformer_engine.version", no_version)
    line = one_line_mistake(main, ["--transformer-impl", "transformer_engine"], capsys)
    assert "--transformer-impl transformer_engine: Transformer Engine is not installed: use local" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param([], "no CUDA device here; --device cpu --size tiny", marks=without_cuda),
        (["--model", "7B"], "7B is not one of 1.5B, 6.2B, 14.6B, 28.3B"),
        (["--cell", "zb-h9"], "argument --cell: invalid choice: 'zb-h9'"),
        (["--only", "stages", "--cell", "zb-h1"], "argument --cell: zb-h1 needs --only ranks, or no --only"),
        (["--only", "ranks", "--model", "1.5B"], "argument --model: 1.5B needs --only stages, or no --only"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--cell", "copies", "--transformer-impl", "transformer_engine"], "copies needs --transformer-impl local"),
        (
            ["--device", "cpu", "--transformer-impl", "transformer_engine"],
            "argument --transformer-impl: transformer_engine needs --device cuda",
        ),
    ],
)
def test_a_mistake_is_one_line(flags, words, capsys):
    line = one_line_mistake(main, flags, capsys)
    assert line.startswith("zero-bubble check: error: ")
    assert words in line
