"""Packed conversations of the fine-tuning example do not attend to each other."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mcore"))

from split_layers import one_rank

from examples.finetune_conversations import build_stage, forward_step, microbatch


def test_losses_of_packed_conversations_are_those_of_each_alone() -> None:
    with one_rank():
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        model, generator = build_stage(), random.Random(5)
        packed = microbatch(generator, packed=3)
        cuts = packed["cu_seqlens"].tolist()
        assert len(set(cuts)) == 4
        losses, _ = forward_step(iter([packed]), model)
        for first, end in pairwise(cuts):
            alone = {name: packed[name][:, first:end] for name in ("tokens", "labels")}
            alone["cu_seqlens"] = torch.tensor([0, end - first])
            expected, _ = forward_step(iter([alone]), model)
            torch.testing.assert_close(losses[:, first:end], expected, rtol=1e-5, atol=1e-5)
