"""The size of a microbatch is found in the data of Megatron-LM, Megatron-Bridge, verl and plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.zero_bubble.runtime.microbatch_sizes import size_of

TOKENS = torch.zeros(2, 5, dtype=torch.long)


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([TOKENS[0, :length] for length in lengths], layout=torch.jagged)


PARTS = torch.nested.narrow(TOKENS, 1, torch.tensor([0, 1]), torch.tensor([2, 4]), layout=torch.jagged)


@pytest.mark.parametrize(
    ("item", "size"),
    [
        pytest.param({"tokens": TOKENS, "loss_mask": torch.ones(2, 5)}, (10, 50), id="Megatron-LM"),
        pytest.param({"tokens": None, "labels": TOKENS}, (10, 50), id="labels alone"),
        pytest.param({"input_ids": TOKENS}, (10, 50), id="Hugging Face"),
        pytest.param(
            {"tokens": torch.zeros(1, 9, dtype=torch.long), "cu_seqlens": torch.tensor([[0, 4, 9]])},
            (9, 16 + 25),
            id="packed",
        ),
        pytest.param({"cu_seqlens": torch.tensor([0, 4, 9, -1, -1])}, (9, 41), id="packed, padded offsets"),
        pytest.param(
            {"input_ids": TOKENS, "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])},
            (4, 10),
            id="verl",
        ),
        pytest.param({"input_ids": TOKENS, "attention_mask": torch.ones(1, 1, 5, 5)}, (10, 50), id="mask of scores"),
        pytest.param({"input_ids": jagged(3, 5)}, (8, 34), id="verl without padding"),
        pytest.param({"attention_mask": jagged(3, 5), "input_ids": jagged(3, 5)}, (8, 34), id="mask without padding"),
        pytest.param(PARTS, (6, 20), id="parts of a tensor"),
        pytest.param({"input_ids": torch.nested.nested_tensor([TOKENS[0], TOKENS[1]])}, None, id="strided"),
        pytest.param(TOKENS, (10, 50), id="a tensor"),
        pytest.param((torch.rand(2, 5), TOKENS), (10, 50), id="a tuple"),
        pytest.param({"images": torch.rand(2, 3, 4, 4)}, None, id="no tokens"),
        pytest.param("text", None, id="text"),
        pytest.param(None, None, id="nothing"),
    ],
)
def test_sizes(item: Any, size: tuple[int, int] | None):
    assert size_of(item) == size


def test_a_mapping_that_is_none_of_python_s():
    """Such as a TensorDict, which has keys and items but is no `Mapping`."""

    class Batch:
        def keys(self) -> list[str]:
            return ["input_ids"]

        def __getitem__(self, name: str) -> torch.Tensor:
            return TOKENS

    assert size_of(Batch()) == (10, 50)
