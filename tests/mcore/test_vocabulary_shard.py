"""The formulas of vocabulary shards against torch's own embedding and cross entropy on the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, embedding

from megatron.zero_bubble.mcore.vocabulary_shard import Rows, add_embedding_gradient, combine, look_up, softmax

VOCABULARY, HIDDEN, TOKENS, SHARDS = 24, 8, 15, 3
PER_SHARD = VOCABULARY // SHARDS
ALL_ROWS = [Rows(first, PER_SHARD) for first in range(0, VOCABULARY, PER_SHARD)]


def example(dtype: torch.dtype, *, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights, labels and the loss's gradient; labels are in all shards, and in each at both ends."""
    generator = torch.Generator().manual_seed(3)
    hidden = size * torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[:6] = torch.tensor([0, 7, 8, 15, 16, 23])
    loss_gradient = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), labels, loss_gradient


def on_shards(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, loss_gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of every token and the gradients of hidden states and weights, put together from all shards."""
    shards = weight.split(PER_SHARD)
    made = [softmax(shard, rows, hidden, labels) for shard, rows in zip(shards, ALL_ROWS, strict=True)]
    statistics = torch.stack([one.statistics for one in made])
    loss, _ = combine(statistics, 0)
    g = loss_gradient.to(statistics.dtype)
    alphas = [combine(statistics, shard)[1] for shard in range(SHARDS)]
    products = [one.logits_gradient(alpha, g).t() @ hidden for one, alpha in zip(made, alphas, strict=True)]
    terms = [one.take_input_gradient(alpha) for one, alpha in zip(made, alphas, strict=True)]
    return loss, g.unsqueeze(1) * torch.stack(terms).sum(dim=0), torch.cat(products)


def by_torch(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, loss_gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    loss = cross_entropy(hidden @ weight.t(), labels, reduction="none")
    loss.backward(loss_gradient)
    return loss.detach(), hidden.grad, weight.grad


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return ((ours.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
    ids=str,
)
def test_losses_and_gradients_are_those_of_cross_entropy(dtype, bound):
    data = example(dtype)
    for ours, expected in zip(on_shards(*data), by_torch(*data), strict=True):
        assert largest_error(ours, expected) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)], ids=str)
def test_gradients_of_sure_predictions_keep_their_digits(dtype, bound):
    """The gradients are differences of probabilities and 1, a few thousandths; their largest is right to 8 or 11 bits.

    The logits are exact in these types, so that nothing but the gradients is rounded.
    """
    hidden, weight = torch.eye(HIDDEN, dtype=dtype), torch.zeros(VOCABULARY, HIDDEN, dtype=dtype)
    labels = torch.arange(HIDDEN) * 3
    weight[labels, torch.arange(HIDDEN)] = 9.0
    data = hidden, weight, labels, torch.ones(HIDDEN, dtype=torch.float64)
    _, input_gradient, weight_gradient = on_shards(*data)
    _, expected_input, expected_weight = by_torch(*data)
    assert expected_weight.abs().max() < 0.003
    assert largest_error(input_gradient, expected_input) < bound
    assert largest_error(weight_gradient, expected_weight) < bound


def test_a_label_outside_of_the_vocabulary_has_megatron_cores_loss():
    """Its term is 0 after the maximum is subtracted."""
    hidden, weight, labels, _ = example(torch.float64)
    labels[::4] = -100
    logits = hidden @ weight.t()
    logits -= logits.amax(dim=1, keepdim=True)
    at_label = logits[torch.arange(TOKENS), labels.clamp(min=0)]
    expected = logits.exp().sum(dim=1).log() - torch.where(labels == -100, 0.0, at_label)
    loss, *_ = on_shards(hidden, weight, labels, torch.ones(TOKENS, dtype=torch.float64))
    assert largest_error(loss, expected) < 1e-14


def test_logits_of_any_size_are_safe():
    data = example(torch.float32, size=300.0)
    for ours, expected in zip(on_shards(*data), by_torch(*data), strict=True):
        assert ours.isfinite().all()
        assert largest_error(ours, expected) < 1e-5


def test_small_probabilities_survive_in_fp16():
    """A probability of 1e-6 times a scaled loss of 2^12 is a normal number, which fp16 without a scale cuts to 17."""
    hidden, weight = torch.ones(1, 1).half(), torch.zeros(VOCABULARY, 1).half()
    weight[0] = 13.8
    labels, g = torch.tensor([0]), torch.tensor([4096.0])
    _, _, gradient = on_shards(hidden, weight, labels, g)
    _, _, expected = by_torch(hidden, weight, labels, g.double())
    assert torch.allclose(gradient[1:].double(), expected[1:], rtol=2e-3, atol=0)


def test_an_evaluation_has_the_losses_alone():
    hidden, weight, labels, _ = example(torch.float32)
    shards = zip(weight.split(PER_SHARD), ALL_ROWS, strict=True)
    made = [softmax(shard, rows, hidden, labels, with_gradients=False) for shard, rows in shards]
    assert all(one.difference is None and one.product is None for one in made)
    loss, _ = combine(torch.stack([one.statistics for one in made]), 0)
    assert torch.equal(loss, on_shards(*example(torch.float32))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_is_that_of_torch(dtype):
    _, weight, tokens, _ = example(dtype)
    tokens = tokens.view(3, 5)
    whole = weight.clone().requires_grad_()
    expected = embedding(tokens, whole)
    gradient = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected.float().backward(gradient.float())
    shards = weight.split(PER_SHARD)
    parts = [look_up(shard, rows, tokens) for shard, rows in zip(shards, ALL_ROWS, strict=True)]
    assert torch.equal(sum(parts), expected), "bit for bit: all terms but one are zeros"
    totals = [torch.zeros(PER_SHARD, HIDDEN) for _ in ALL_ROWS]
    for total, rows in zip(totals, ALL_ROWS, strict=True):
        add_embedding_gradient(total, rows, tokens, gradient)
    assert largest_error(torch.cat(totals), whole.grad.double()) < (1e-6 if dtype is torch.float32 else 1e-2)
