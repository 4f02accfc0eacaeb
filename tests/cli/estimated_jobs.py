"""Jobs whose estimates the tests look at: a small model, a large one, and any that flags of Megatron-LM describe."""

from __future__ import annotations

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.cli.trainings import complete_arguments

SMALL = ["--num-layers", "8", "--hidden-size", "48", "--num-attention-heads", "4", "--seq-length", "16"]
SMALL += ["--micro-batch-size", "2", "--vocab-size", "300", "--pipeline-model-parallel-size", "2"]
FULLY = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
UNTIED = "--untie-embeddings-and-output-weights"
LARGE = [*SMALL, "--hidden-size", "4096", "--pipeline-model-parallel-size", "4", "--global-batch-size", "12"]
POST_VALIDATION = ["--zero-bubble", "--zero-bubble-post-validation"]
EIGHT, FOUR = ["--world-size", "8"], ["--world-size", "4"]


def arguments(*flags: str, world_size: int = 2):
    required = ["--train-iters", "1", "--lr", "1e-4", "--mock-data"]
    return complete_arguments([*SMALL, *required, *flags], world_size, "test", has_cuda=True)


def job(*flags: str, tool: list[str] = EIGHT) -> EstimatedJob:
    return EstimatedJob.of(read_flags(EstimateFlags, [*tool, "--", *flags], "estimate", ""))
