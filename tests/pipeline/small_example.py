"""Runs an example with small sizes: torchrun --nproc-per-node 2 tests/pipeline/small_example.py alexnet"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

SIZES = {"alexnet": {"NUM_STEPS": 2, "BATCH_SIZE": 8, "IMAGE_SIZE": 96}, "llama": {"NUM_STEPS": 3}}
"""Constants of the examples that are replaced."""

if __name__ == "__main__":
    name = sys.argv.pop()
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module(name)
    for constant, value in SIZES[name].items():
        assert hasattr(example, constant), constant
        setattr(example, constant, value)
    sys.exit(example.main())
