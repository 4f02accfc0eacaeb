"""Flags that megatron-core's optimizer or DDP refuses are one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.trainer import optimization
from megatron.zero_bubble.trainer.optimization import build_optimizer, wrap_in_ddp
from tests.checked_flags import checked

CONFIG: Any = SimpleNamespace(params_dtype=torch.bfloat16, fp8=None, timers=None)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"--exp-avg-dtype": "bf16"}, "exp_avg_dtype can only be fp32 when not using precision-aware optimizer"),
        (
            {"--main-params-dtype": "fp16"},
            "main_params_dtype can only be fp32 when not using precision-aware optimizer",
        ),
    ],
)
def test_an_optimizer_that_megatron_core_refuses(flags: dict[str, str | None], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^megatron-core refuses this optimizer: {reason}$"):
        build_optimizer(checked({"--bf16": None, **flags}), [], CONFIG)


def test_an_optimizer_of_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    aware = {"--bf16": None, "--use-precision-aware-optimizer": None}
    with pytest.raises(ValueError, match=r"^--use-precision-aware-optimizer needs --use-distributed-optimizer$"):
        checked(aware)
    monkeypatch.setattr(optimization, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--use-precision-aware-optimizer needs the package transformer_engine: "):
        build_optimizer(checked({**aware, "--use-distributed-optimizer": None}), [], CONFIG)


def test_data_parallelism_that_megatron_core_refuses() -> None:
    args = checked({"--bf16": None, "--reuse-grad-buf-for-mxfp8-param-ag": None})
    with pytest.raises(ValueError, match=r"^megatron-core refuses these flags of data parallelism: Reuse grad buffer"):
        wrap_in_ddp(args, CONFIG, [], defers_weights=False)
