"""The check of a GPU, tried on a CPU: the same code, at toy size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import main  # noqa: E402  (tools/ is where running the script looks, too)

TRY = ["--device", "cpu", "--size", "tiny", "--rounds", "1"]

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA")


@without_cuda
def test_everything_is_checked(tmp_path):
    output = tmp_path / "gpu.json"
    status = main([*TRY, "--json", "--output", str(output)])
    findings = json.loads(output.read_text())
    assert status == (0 if findings["passed"] else 1)
    assert {(check["schedule"], check["num_ranks"]) for check in findings["numerics"]} >= {("zb-h1", 1), ("zb-2p", 4)}
    assert all(check["passed"] and not check["undetermined"] for check in findings["numerics"])
    [stage] = findings["stages"]
    assert all(stage["times_ms"][kind] > 0 for kind in ("F", "B", "W", "BW"))
    times = stage["times_ms"]
    assert stage["b_and_w_over_fused"] == pytest.approx((times["B"] + times["W"]) / times["BW"])
    assert stage["passed"] == (stage["b_and_w_over_fused"] <= 1.03)
    rates = stage["predicted_bubble_rates"]
    assert rates["zb-2p"] <= rates["zb-h1"] < rates["1f1b"]
    memory = stage["memory_bytes"]
    assert memory["F"] + memory["B"] + memory["W"] == pytest.approx(0, abs=1)
    # By formula, within what megatron-core's unfused layers keep besides.
    assert stage["expected_memory_bytes"][0] == pytest.approx(memory["F"], rel=0.25)
    assert stage["expected_memory_bytes"][1] == pytest.approx(-memory["W"], rel=0.02)
    assert [check["schedule"] for check in stage["peak_memory"]] == ["1f1b", "zb-h1", "zb-2p"]
    for check in stage["peak_memory"]:
        assert check["measured"] == pytest.approx(check["simulated"], rel=1e-6)


@without_cuda
def test_a_wrong_gradient_is_found_and_told(monkeypatch, capsys):
    from gpu_check_cli import numerics

    from megatron.zero_bubble.mcore.linear import LayerWeightGrad

    accumulate = LayerWeightGrad.accumulate
    monkeypatch.setattr(LayerWeightGrad, "accumulate", lambda self, grad, into: accumulate(self, grad * 1.01, into))
    monkeypatch.setattr(numerics, "CASES", (("zb-h1", 2),))
    assert main(TRY) == 1
    assert "tensors differ" in capsys.readouterr().out


@without_cuda
def test_an_error_leaves_nothing_behind(monkeypatch):
    from gpu_check_cli import numerics
    from megatron.core import parallel_state

    def fail(*_: object) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(numerics, "_run_megatron_core", fail)
    with pytest.raises(RuntimeError, match="no step"):
        main(TRY)
    assert not torch.distributed.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param([], "no CUDA device here; --device cpu --size tiny", marks=without_cuda),
        (["--model", "7B"], "7B is not one of 1.5B, 6.2B, 14.6B, 28.3B"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as exit:
        main(flags)
    output, errors = capsys.readouterr()
    assert (exit.value.code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("gpu_check.py: error: ")
    assert words in errors
