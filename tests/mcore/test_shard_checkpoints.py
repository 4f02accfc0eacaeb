"""A checkpoint has each row of a gated layer at the place that it has without sharding."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.zero_bubble.mcore.shard_checkpoints import places_of_gated_rows


@pytest.mark.parametrize(("num_replicas", "num_ranks"), itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 4)))
def test_shards_of_gated_rows_make_up_the_whole(num_replicas: int, num_ranks: int) -> None:
    rows = 6 * num_replicas * num_ranks
    whole = torch.arange(2 * rows)
    gate, inputs = whole.chunk(2)
    saved = torch.full_like(whole, -1)
    for rank, parts in enumerate(zip(gate.chunk(num_ranks), inputs.chunk(num_ranks), strict=True)):
        for replica, shard in enumerate(torch.cat(parts).chunk(num_replicas)):
            places, num_places = places_of_gated_rows(replica, num_replicas, rank, num_ranks)
            for place, piece in zip(places, shard.chunk(len(places)), strict=True):
                assert len(piece) * num_places == len(whole)
                saved[place * len(piece) : (place + 1) * len(piece)] = piece
    assert saved.tolist() == whole.tolist()
