"""Values of flags that are not given."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.defaults import completed
from tests.trainer.test_arguments import REQUIRED


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ("", "flash"),
        ("--window-size 4,0", "local"),
        ("--softmax-type off-by-one", "local"),
        ("--apply-query-key-layer-scaling", "local"),
        ("--attention-backend fused", "fused"),
    ],
)
def test_local_layers_on_a_gpu_use_torchs_fused_attention_unless_it_lacks_a_flag(flags: str, backend: str) -> None:
    words = [*REQUIRED, "--mock-data", "--vocab-size", "100", *flags.split()]
    given = parse_arguments(words, "pretrain_gpt.py")
    assert completed(given, {}, has_cuda=True).attention_backend == backend
    if "backend" not in flags:
        assert completed(given, {}, has_cuda=False).attention_backend == "local"


def test_a_rank_is_below_the_number_of_ranks() -> None:
    given = parse_arguments([*REQUIRED, "--mock-data", "--vocab-size", "100"], "pretrain_gpt.py")
    with pytest.raises(ValueError, match=r"^environment variable RANK=2: must be below WORLD_SIZE=2$"):
        completed(given, {"RANK": "2", "WORLD_SIZE": "2"}, has_cuda=False)
