"""Models are counted without any device, also on a machine with a GPU and with Transformer Engine."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random

from megatron.zero_bubble.cli.trainings import complete_training
from megatron.zero_bubble.mcore import layer_spec, meta_device
from megatron.zero_bubble.mcore.cpu import substitutions
from megatron.zero_bubble.trainer.model_count import count_model

JOB = "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 300 "
JOB += "--pipeline-model-parallel-size 2 --train-iters 1 --lr 1e-4 --mock-data --bf16"


@pytest.mark.parametrize("flags", ["", "--transformer-impl transformer_engine", "--mtp-num-layers 1"])
def test_a_gpu_and_its_layers_are_left_alone(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*args: Any, **options: Any) -> Any:
        raise AssertionError("a count uses the GPU")

    args, _ = complete_training(f"{JOB} {flags}".split(), 2, "test", has_cuda=True, for_this_machine=False)
    expected = count_model(args)
    # A machine with CUDA, on which `substitute_cuda()` replaces nothing.
    for owner, name, *_ in substitutions():
        if owner in (torch.cuda, torch.cuda.random, random) and callable(getattr(owner, name)):
            monkeypatch.setattr(owner, name, used)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # With Transformer Engine, megatron-core's stacks of local layers end with its norm.
    monkeypatch.setattr(meta_device, "find_spec", lambda name: True)
    monkeypatch.setattr(layer_spec, "LayerNormImpl", used)
    hook = sys.excepthook
    assert count_model(args) == expected
    assert sys.excepthook is hook
