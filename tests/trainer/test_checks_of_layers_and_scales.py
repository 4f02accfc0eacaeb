"""Frequencies of layers and loss scales that cannot work are refused before any process group exists."""

from __future__ import annotations

import pytest

from tests.checked_flags import checked


@pytest.mark.parametrize("name", ["--moe-layer-freq", "--window-attn-skip-freq", "--no-rope-freq"])
def test_a_kind_of_layer_comes_back_after_at_least_one_layer(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0$"):
        checked({name: "0"})


def test_a_dynamic_loss_scale_begins_above_its_minimum() -> None:
    low = {"--initial-loss-scale": "0.5"}
    with pytest.raises(ValueError, match=r"^--min-loss-scale 1\.0 is above --initial-loss-scale 0\.5$"):
        checked({"--fp16": None, **low})
    checked({"--fp16": None, "--loss-scale": "2", **low})
    checked({"--bf16": None, **low})
