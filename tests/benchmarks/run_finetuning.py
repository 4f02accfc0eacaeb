"""Runs the benchmark of fine-tuning on the ranks that torchrun starts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.finetuning import main

if __name__ == "__main__":
    sys.exit(main())
