"""What a step keeps of a microbatch whose operations on the vocabulary shard are done."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from split_layers import BATCH, HIDDEN, SEQUENCE, one_rank

from megatron.zero_bubble.mcore.step_call import default_groups
from megatron.zero_bubble.mcore.vocabulary_model import VocabularyShard
from megatron.zero_bubble.mcore.vocabulary_run import VocabularyRun, open_collectives
from megatron.zero_bubble.mcore.vocabulary_shard import Rows, ShardWeight
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep
from megatron.zero_bubble.schedule import Op, OpKind

VOCABULARY = 8


def test_nothing_as_large_as_the_hidden_states_is_kept_behind_t() -> None:
    with one_rank():
        rows, groups, last_layer = Rows(0, VOCABULARY), default_groups(), SimpleNamespace()
        embedding, output = (ShardWeight(torch.randn(VOCABULARY, HIDDEN), rows, {}, num_uses=1) for _ in range(2))
        collectives = open_collectives(groups, torch.device("cpu"), timedelta(seconds=60))
        shard, lane, unused = VocabularyShard(embedding, output, 0, 1), None, None
        run: Any = VocabularyRun(shard, collectives, lane, 0, 0, groups.tp, False, False, unused, last_layer)  # type: ignore[arg-type]
        step = VocabularyStep(run, 2, (SEQUENCE, BATCH, HIDDEN), forward_only=False)
        for microbatch in range(2):
            hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
            last_layer.loss_inputs = hidden, torch.randint(VOCABULARY, (BATCH, SEQUENCE))
            step.end_last_stage(microbatch)
            step.exchange(Op(OpKind.HIDDEN, microbatch))
            step.compute_softmax(microbatch)
            step.exchange(Op(OpKind.SOFTMAX, microbatch))
            losses, _ = step.begin_loss(microbatch)
            step.end_loss(microbatch, torch.ones_like(losses))
            step.exchange(Op(OpKind.LOSS_GRAD, microbatch))
            assert any(tensor.numel() >= hidden.numel() for tensor in step.held_tensors())
            step.gradient_of_last_stage(microbatch)
            step.add_output_gradient(microbatch)
            assert all(tensor.numel() < hidden.numel() for tensor in step.held_tensors())
        collectives.close()
