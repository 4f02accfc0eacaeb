"""Modules of megatron-core that need triton find a stand-in where there is none, and nobody else does."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import environment

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, size: tl.constexpr): ...
"""
SCRIPT = """
import sys
from megatron.zero_bubble.mcore.triton_stand_in import stand_in_for_triton

stand_in_for_triton()
stand_in_for_triton()
from kernels import paged_stash
assert "triton" not in sys.modules
assert paged_stash.__file__.endswith("paged_stash.py")
from kernels import others
"""


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_a_module_that_needs_triton_is_imported_without(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    for name in ("paged_stash", "others"):
        (tmp_path / "kernels" / f"{name}.py").write_text(KERNELS)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "script.py")]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert "others.py" in result.stderr, result.stderr
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'triton'\n")
