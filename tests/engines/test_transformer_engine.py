"""W of Transformer Engine's own layers is deferred bit for bit; `make test-megatron` fetches its Python sources."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.launch import ROOT

MODELS = (
    "",
    "--no-gradient-accumulation-fusion",
    "--disable-bias-linear --add-qkv-bias",
    "--disable-bias-linear --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2",
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2",
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm",
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm",
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --no-gradient-accumulation-fusion --squared-relu",
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --quick-geglu --glu-linear-offset 1 "
    "--activation-func-clamp-value 7",
)


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, list[str]]]:
    try:
        version("transformer-engine")
    except PackageNotFoundError:
        pytest.skip("there is no Transformer Engine: make test-megatron fetches its Python sources")
    module = "tests.engines.compared_gradients"
    command = [sys.executable, "-O", "-W", "ignore", "-m", module, *MODELS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, dict[str, list[str]]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("flags", MODELS)
def test_late_weight_gradients_equal_the_fused_backward(flags: str, compared: dict[str, dict[str, list[str]]]) -> None:
    """Also with biases, whose gradients B computes where megatron-core adds the bias, and W elsewhere."""
    assert compared[flags] == {"different": [], "zero": []}
