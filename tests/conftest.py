"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import close_ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_a_module() -> Iterator[None]:
    """End the ranks that the tests of a module have started."""
    yield
    close_ranks()
