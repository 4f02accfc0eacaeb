"""The gradients of a tied embedding whose two copies are on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.mcore.placement import finalize_gradients
from megatron.zero_bubble.schedule import Placement


class Stage(torch.nn.Module):
    """A first or last stage that has nothing but its copy of the embedding."""

    share_embeddings_and_output_weights, mtp_process = True, False

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.pre_process, self.post_process = is_first, not is_first
        self.weight: Any = torch.nn.Parameter(torch.ones(2))

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.weight


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_copies_of_a_tied_embedding_get_the_sum_of_their_gradients_unless_they_are_frozen(is_frozen: bool) -> None:
    chunks = [Stage(is_first=True), Stage(is_first=False)]
    for chunk, gradient in zip(chunks, (1.0, 2.0), strict=True):
        chunk.weight.requires_grad_(not is_frozen)
        if not is_frozen:
            chunk.weight.main_grad = torch.full((2,), gradient)
    config, groups = SimpleNamespace(finalize_model_grads_func=lambda *given, **options: None), Any
    finalize_gradients(config, Placement("v", 2, 2), chunks, None, groups, None)
    for chunk in chunks:
        assert is_frozen or chunk.weight.main_grad.tolist() == [3.0, 3.0]
