"""The tensors that a step keeps of a microbatch: for its operations on the vocabulary shard, and to send them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from split_layers import BATCH, HIDDEN, SEQUENCE, one_rank

from megatron.zero_bubble.mcore.step_call import default_groups
from megatron.zero_bubble.mcore.vocabulary_model import VocabularyShard
from megatron.zero_bubble.mcore.vocabulary_run import VocabularyRun, open_collectives
from megatron.zero_bubble.mcore.vocabulary_shard import Rows, ShardWeight
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep
from megatron.zero_bubble.runtime.collectives import TorchCollectives
from megatron.zero_bubble.schedule import Op, OpKind

VOCABULARY = 8


@contextmanager
def one_shard(*, forward_only: bool) -> Iterator[tuple[VocabularyStep, SimpleNamespace]]:
    """A step of two microbatches on one rank with the whole vocabulary, and its output layer."""
    with one_rank():
        rows, groups, last_layer = Rows(0, VOCABULARY), default_groups(), SimpleNamespace()
        embedding, output = (ShardWeight(torch.randn(VOCABULARY, HIDDEN), rows, {}, num_uses=1) for _ in range(2))
        collectives = open_collectives(groups, torch.device("cpu"), timedelta(seconds=60))
        shard, lane, unused = VocabularyShard(embedding, output, 0, 1), None, None
        run: Any = VocabularyRun(shard, collectives, lane, 0, 0, groups.tp, False, False, unused, last_layer)  # type: ignore[arg-type]
        yield VocabularyStep(run, 2, (SEQUENCE, BATCH, HIDDEN), forward_only=forward_only), last_layer
        collectives.close()


def test_nothing_as_large_as_the_hidden_states_is_kept_behind_t() -> None:
    with one_shard(forward_only=False) as (step, last_layer):
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


@pytest.mark.parametrize("forward_only", [True, False])
def test_a_late_broadcast_sends_tensors_that_the_operations_have_forgotten(
    forward_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []
    with one_shard(forward_only=forward_only) as (step, last_layer):
        hidden, labels = torch.randn(SEQUENCE, BATCH, HIDDEN), torch.randint(VOCABULARY, (BATCH, SEQUENCE))
        last_layer.loss_inputs = hidden, labels
        step.end_last_stage(0)
        step.compute_softmax(0)
        step.exchange(Op(OpKind.SOFTMAX, 0))
        if not forward_only:
            losses, _ = step.begin_loss(0)
            step.end_loss(0, torch.ones_like(losses))
            step.gradient_of_last_stage(0)
            step.add_output_gradient(0)
        monkeypatch.setattr(TorchCollectives, "broadcast", lambda self, tensor, root: sent.append(tensor))
        step.exchange(Op(OpKind.HIDDEN, 0))
    assert [tensor.data_ptr() for tensor in sent] == [hidden.data_ptr(), labels.data_ptr()]
    assert all(tensor.numel() < hidden.numel() for tensor in step.held_tensors())


def test_a_shard_that_the_loop_freezes_is_evaluated_but_not_trained() -> None:
    with one_shard(forward_only=True) as (step, _):
        run, shape = step._run, (SEQUENCE, BATCH, HIDDEN)
        run.shard.output.weight.requires_grad_(False)
        VocabularyStep(run, 2, shape, forward_only=True)
        with pytest.raises(ValueError, match=r"^--zero-bubble-vocabulary-parallel: the training loop has frozen"):
            VocabularyStep(run, 2, shape, forward_only=False)
