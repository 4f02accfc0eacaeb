"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from token_data import counting, write_tokens


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """The process groups of a job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Forty documents that count their tokens."""
    return write_tokens(tmp_path / "corpus", counting(0))
