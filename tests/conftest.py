"""The order of tests, the examples that hypothesis draws, and fixtures of all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.ranks import close_ranks

if TYPE_CHECKING:
    import torch.distributed

hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("new")
# Every run draws the same examples; HYPOTHESIS_PROFILE=new draws others.
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

LONGEST = ("end_to_end", "launcher", "cli", "mcore")
"""Folders whose files take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is alone with one of them at the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_a_module() -> Iterator[None]:
    """End the ranks that the tests of a module have started, and check that no hooks on saved tensors are left."""
    yield
    close_ranks()
    if (torch := sys.modules.get("torch")) is not None:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def one_rank() -> Iterator[torch.distributed.ProcessGroup]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()
