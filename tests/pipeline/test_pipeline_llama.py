"""A Hugging Face Llama in a pipeline, as the example splits it, has the bits of one process."""

from __future__ import annotations

import copy
import runpy
from types import SimpleNamespace

import pytest
import torch
from rank_threads import merged, on_ranks
from torch import nn

from megatron.zero_bubble import Pipeline
from megatron.zero_bubble.planner import names
from tests.launch import ROOT

transformers = pytest.importorskip("transformers")

SCHEDULES = [name for name in names() if name != "optimal"]
NEEDS_MORE = ("dualpipe-v", 4)
"""A schedule that needs more than the four microbatches of these tests on as many ranks."""
MAX_NORM = 0.5


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "llama.py")))


def small_llama(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=num_layers)
    return transformers.LlamaForCausalLM(config)


def small_batch(example, step: int) -> torch.Tensor:
    return example.make_batch(step)[:8, :16]


def train_in_one_process(example, model, num_steps):
    """Return losses and norms; the gradients of the last step stay."""
    optimizer, results = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of_step = torch.zeros(())
        for tokens in small_batch(example, step).chunk(4):
            loss = example.next_token_loss(model(tokens, use_cache=False).logits, tokens) / 4
            loss.backward()
            loss_of_step += loss.detach()
        results.append((loss_of_step, nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return results


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_steps"),
    [("zb-v", 2, 10)]
    + [pytest.param(s, p, 1, marks=pytest.mark.exhaustive) for s in SCHEDULES for p in (2, 4) if (s, p) != NEEDS_MORE]
    + [pytest.param("zb-h1", 4, 10, marks=pytest.mark.exhaustive)],
)
def test_losses_gradients_and_parameters_are_those_of_one_process(example, schedule, num_ranks, num_steps):
    model = small_llama(num_layers=5)
    reference = copy.deepcopy(model)
    expected = train_in_one_process(example, reference, num_steps)
    assert expected[0][1] > MAX_NORM, "nothing was clipped"

    def train(interconnect):
        layers = example.layers_of(copy.deepcopy(model))
        pipeline = Pipeline(layers, example.next_token_loss, schedule, 4, interconnect=interconnect)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        for step, (loss, norm) in enumerate(expected):
            optimizer.zero_grad()
            tokens = small_batch(example, step)
            assert torch.equal(pipeline.train_batch((tokens, tokens)), loss)
            assert torch.equal(pipeline.clip_grad_norm_(MAX_NORM), norm)
            optimizer.step()
        return {name: (value, value.grad) for name, value in pipeline.named_parameters()}

    found = merged(on_ranks(num_ranks, train))
    whole = nn.Sequential(*example.layers_of(reference))
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert torch.equal(found[name][0], parameter), name
        assert torch.equal(found[name][1], parameter.grad), name
