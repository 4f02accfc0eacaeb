"""Where the tokens of a context-parallel rank are in the sequence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core.utils import get_batch_on_this_cp_rank
from split_layers import one_rank

from megatron.zero_bubble.mcore.attention import positions
from megatron.zero_bubble.mcore.placement import StagePosition


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("size", [2, 3, 4])
def test_positions_are_those_of_megatron_cores_batches(size):
    whole = torch.arange(24)
    found = []
    for rank in range(size):
        group = StagePosition(rank, size)  # a rank and a size are all that is asked for
        cut = get_batch_on_this_cp_rank({"tokens": whole[None]}, cp_group=group)["tokens"][0]
        assert torch.equal(positions(len(cut), rank, size, cut.device), cut)
        found += cut.tolist()
    assert sorted(found) == whole.tolist()
