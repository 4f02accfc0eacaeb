"""Benchmarks of a tiny training, as the flags of `zero-bubble benchmark`."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.invocation import read_flags

TINY = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
TINY += ["--micro-batch-size", "1", "--mock-data", "--vocab-size", "120"]
SIZE = ["--pipeline-size", "2", "--num-microbatches", "4"]


def arguments(*flags: str, training: Sequence[str] = ()):
    return read_flags(BenchmarkFlags, [*SIZE, *flags, "--", *TINY, *training], "benchmark", "")
