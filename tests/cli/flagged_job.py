"""A job that is estimated under its own flags, and the lines that the estimate prints about it."""

from __future__ import annotations

import estimated_jobs
import pytest
from estimated_jobs import FOUR

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate
from megatron.zero_bubble.cli.estimate_command import main

GIB = 2**30
JOB = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024", "--bf16"]
JOB += ["--micro-batch-size", "2", "--global-batch-size", "16", "--vocab-size", "1000"]
JOB += ["--pipeline-model-parallel-size", "4", "--untie-embeddings-and-output-weights"]
LIMIT = "--zero-bubble-memory-limit"


def job(*flags: str) -> EstimatedJob:
    return estimated_jobs.job(*JOB, *flags, tool=FOUR)


def lines_of(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    assert main([*FOUR, *command]) == 0
    return capsys.readouterr().out.splitlines()


def room_for(name: str, *flags: str) -> list[str]:
    """A device on which the schedule just fits, with these flags of the job."""
    needed = max(estimate(job(*flags), name).total_bytes) - 3 * GIB
    return ["--device-memory", f"{int(needed) + 1}B", "--reserved-memory", "1B"]
