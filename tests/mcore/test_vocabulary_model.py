"""Model chunks are given shards of the vocabulary, or refused; a forward step is run without its model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from split_layers import Layers, make_config, one_rank

from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.recorded_call import record_call
from megatron.zero_bubble.mcore.vocabulary_model import shard_vocabulary, why_not_replaced
from megatron.zero_bubble.mcore.vocabulary_shard import Rows, ShardWeight
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement

ROWS, HIDDEN, TOKENS = Rows(8, 4), 3, 6


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


def first_stage(**settings: Any) -> GPTModel:
    config = make_config()
    model = GPTModel(config, get_gpt_layer_local_spec(), 128, 16, pre_process=True, post_process=False)
    for name, value in settings.items():
        setattr(config, name, value)
    return model


@pytest.mark.parametrize(
    ("settings", "num_ranks", "message"),
    [
        ({}, 1, "needs at least two pipeline ranks"),
        (
            {},
            3,
            "a padded vocabulary of 128 does not divide .*: --make-vocab-size-divisible-by 384 makes it",
        ),
        ({"mtp_num_layers": 1}, 2, "does not work with --mtp-num-layers 1: .*; leave it out"),
        ({"variable_seq_lengths": True}, 2, "does not work with --variable-seq-lengths: "),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(settings, num_ranks, message):
    model = first_stage(**settings)
    with pytest.raises(ValueError, match=f"^--zero-bubble-vocabulary-parallel .*{message}") as error:
        shard_vocabulary([model], Placement("linear", num_ranks))
    assert "\n" not in str(error.value)
    assert model.embedding.word_embeddings.weight.shape[0] == 128, "and left as they are"


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"needs megatron-core's GPTModel or \w+, got Layers"):
        shard_vocabulary([Layers()], Placement("linear", 2))


def in_ddp(weight: ShardWeight, *, overlap: bool) -> tuple[DistributedDataParallel, list[str]]:
    """Wrap the weight in DDP beside another layer, both in one bucket; `events` says when it is reduced."""
    model = Layers()
    model.add_module("shard", weight)
    split_weight_gradients([model], WeightGradStore())
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=1, delay_wgrad_compute=True
    )
    ddp, events = DistributedDataParallel(model.config, config, model), []
    [group] = [one for one in ddp.bucket_groups if weight.weight in one.params]
    start = group.start_grad_sync

    def recording(*args: Any, **kwargs: Any) -> None:
        events.append("reduce")
        start(*args, **kwargs)

    group.start_grad_sync = recording
    return ddp, events


@pytest.mark.parametrize("order", [("T0", "T1", "E0", "E1"), ("E0", "T0", "E1", "T1"), ("T0", "E0", "T1", "E1")])
def test_tied_weights_are_reduced_once_with_the_same_bits_in_every_order(order):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, TOKENS, ROWS.count, generator=generator)
    hidden, gradient = torch.randn(2, 2, TOKENS, HIDDEN, generator=generator)
    tokens = torch.randint(8, 12, (2, TOKENS), generator=generator)
    weight = ShardWeight(torch.zeros(ROWS.count, HIDDEN), ROWS, {"is_embedding_or_output_parameter": True}, num_uses=2)
    assert weight.weight.is_embedding_or_output_parameter
    ddp, events = in_ddp(weight, overlap=True)
    expected = logits[0].t() @ hidden[0] + logits[1].t() @ hidden[1]
    embedding = torch.zeros(ROWS.count, HIDDEN)
    embedding.index_put_((tokens.flatten() - ROWS.first,), gradient.flatten(0, 1), accumulate=True)
    for _ in range(2):  # DDP learns in the first step which gradients there are
        ddp.zero_grad_buffer()
        events.clear()
        for operation in order:
            microbatch = int(operation[1])
            if operation[0] == "T":
                weight.add_output_gradient(logits[microbatch], hidden[microbatch], is_fused=False)
            else:
                weight.add_embedding_gradient(tokens[microbatch], gradient[microbatch])
            assert events == []
            if microbatch == 1:
                weight.complete()
        early = list(events)
        ddp.finish_grad_sync()
    assert early == ["reduce"], "right after the last of its gradients"
    assert torch.equal(weight.weight.main_grad, expected + embedding)
    assert weight.weight.grad is None


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_forward_step_runs_without_its_model():
    model = Wrapper(Layers())

    def forward_step(data_iterator: Iterator[str], given: Any) -> tuple[Any, str]:
        assert get_attr_wrapped_model(given, "num_uses") == 1
        assert isinstance(given, Wrapper)
        assert unwrap_model(given).module is model.module
        given.training = False
        return given(next(data_iterator), labels="labels"), "loss function"

    call = record_call(forward_step, iter(["tokens"]), model, "--flag")
    assert call == (("tokens",), {"labels": "labels"}, "loss function")
    assert call.tokens == "tokens"
    assert not model.training
    output = call.forward_step(None, lambda tokens, labels: SimpleNamespace(tokens=tokens, labels=labels))
    assert output == (SimpleNamespace(tokens="tokens", labels="labels"), "loss function")


@pytest.mark.parametrize(
    ("forward_step", "message"),
    [
        (lambda data, model: ([model(1)], None), "called the model 1 times and returned list"),
        (lambda data, model: ((model(1), model(2))[0], None), "called the model 2 times"),
        (lambda data, model: (data, None), "called the model 0 times and returned NoneType"),
        (lambda data, model: (model(1).mean(), None), "computes with it: .* has no attribute 'mean'"),
        (lambda data, model: (2 * model(1), None), "computes with it: unsupported operand"),
        (lambda data, model: (torch.sum(model(1)), None), r"computes with it: sum\(\)"),
    ],
)
def test_a_forward_step_that_does_more_with_its_model_is_refused(forward_step, message):
    with pytest.raises(ValueError, match=f"^--flag needs a forward step that calls the model once .*{message}"):
        record_call(forward_step, None, Layers(), "--flag")


class Capped(ColumnParallelLinear):
    def forward(self, *arguments, **options):
        logits, bias = super().forward(*arguments, **options)
        return torch.tanh(logits), bias


class Scaled(VocabParallelEmbedding):
    def forward(self, tokens):
        return 5 * super().forward(tokens)


class WithAnotherLoss(GPTModel):
    def compute_language_model_loss(self, labels, logits):
        return super().compute_language_model_loss(labels, logits) + logits.logsumexp(-1).transpose(0, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.output_layer, "__class__", Capped), "ColumnParallelLinear .Capped. has a forward"),
        (lambda model: setattr(model.embedding.word_embeddings, "__class__", Scaled), ".Scaled. has a forward of its"),
        (lambda model: setattr(model, "__class__", WithAnotherLoss), "a compute_language_model_loss of its own"),
        (lambda model: setattr(model, "_postprocess", print), "has a _postprocess of its own"),
        (lambda model: model.output_layer.register_forward_hook(print), "ColumnParallelLinear has hooks"),
        (lambda model: model.embedding.word_embeddings.weight.register_hook(print), "VocabParallelEmbedding has hooks"),
        (lambda model: setattr(model.output_layer, "bias", torch.nn.Parameter(torch.zeros(128))), "has a bias"),
        (lambda model: model.output_layer.weight.requires_grad_(False), "is frozen"),
    ],
)
def test_shards_do_not_replace_a_users_own_embedding_output_layer_and_loss(change, reason):
    spec = get_gpt_layer_local_spec()
    model = GPTModel(make_config(), spec, 128, 16, share_embeddings_and_output_weights=False)
    assert why_not_replaced(model, model) is None
    change(model)
    assert re.search(reason, why_not_replaced(model, model))
