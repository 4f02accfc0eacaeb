"""Layers and losses that change buffers, inputs or targets count each microbatch once, as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_threads import accumulate, merged, pipelines
from torch import nn
from torch.nn.functional import mse_loss

WIDTH = 6


class Changes(nn.Module):
    """Changes its input in place before a linear layer, so that each microbatch needs an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.sub_(0.5).div_(2))


class Centred(nn.Module):
    """Assigns a buffer in the forward instead of changing the buffer in place; the first mean is None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", None)

    def forward(self, x):
        mean = x.detach().mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        self.count = self.count + 1
        return x - self.mean / self.count


class Expanded(nn.Module):
    """Changes a buffer whose elements are one number in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1).expand(WIDTH))

    def forward(self, x):
        self.count[0] += 1
        return x * self.count


class LossWithMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centred = Centred()

    def forward(self, output, target):
        return mse_loss(self.centred(output), target)


class Resized(nn.Module):
    """Gives a buffer its size in the first forward, as observers for quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x):
        found = x.detach().abs().amax(0)
        if not len(self.largest):
            self.largest.resize_(found.shape).zero_()
        self.largest.copy_(torch.maximum(self.largest, found))
        return x / (1 + self.largest)


class Rows(nn.Module):
    """Looks up rows of a bfloat16 table; scaling a row to `max_norm` twice rounds it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, WIDTH, max_norm=0.9, dtype=torch.bfloat16)

    def forward(self, x):
        return self.table(x.mul(1000).long() % 200).sum(1)


def loss_that_changes_its_target(output, target):
    return mse_loss(output, target.mul_(2))


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


CHANGING = {
    "first input": (lambda: [Changes(), *linears(3)], mse_loss),
    "received input": (lambda: [*linears(3), Changes()], mse_loss),
    "relu": (lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)] * 2, mse_loss),
    "target": (lambda: linears(4), loss_that_changes_its_target),
    "loss with buffers": (lambda: linears(4), LossWithMean()),
    "max_norm": (lambda: [Rows(), *(layer.bfloat16() for layer in linears(3))], mse_loss),
    "expanded buffer": (lambda: [Expanded(), *linears(3)], mse_loss),
    "resized buffer": (lambda: [Resized(), *linears(3)], mse_loss),
    "buffers": (lambda: [Centred(), *linears(2), Centred()], mse_loss),  # which R counts twice
}
CASES = [(name, {}) for name in CHANGING] + [(name, {"post_validation": True}) for name in CHANGING]
CASES.remove(("max_norm", {"post_validation": True}))  # refused
CASES += [(name, {"checkpoint": True}) for name in list(CHANGING)[:3]]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=str)
def test_each_microbatch_counts_once(name, arguments):
    make_layers, loss_fn = CHANGING[name]
    torch.manual_seed(4)
    layers, max_norm = [copy.deepcopy(layer) for layer in make_layers()], 0.3
    model, own_loss = nn.Sequential(*copy.deepcopy(layers)), copy.deepcopy(loss_fn)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    expected = []
    for step in range(3):
        loss = accumulate(model, own_loss, batch(step), 4)
        expected.append((loss, nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    assert any(norm > max_norm for _, norm in expected), "no step is amended"

    def train(pipeline):
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.05)
        outcomes = [pipeline.train_step(batch(step), optimizer, max_norm) for step in range(3)]
        outcomes = [outcome for outcome in (*outcomes, pipeline.settle()) if outcome is not None]
        for outcome, (loss, norm) in zip(outcomes, expected, strict=True):
            assert torch.equal(outcome.loss, loss)
            assert torch.equal(outcome.grad_norm, norm)
        return pipeline.state_dict()

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform", **arguments}
    for name, value in merged(pipelines(2, layers, copy.deepcopy(loss_fn), train, **arguments)).items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_pipeline_is_evaluated_in_inference_mode_and_trains_on():
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]

    def use(pipeline):
        optimizer = torch.optim.Adam(pipeline.parameters())
        with torch.inference_mode():
            losses = [pipeline.eval_batch(batch(0))]
        pipeline.train_step(batch(1), optimizer, 1e-3)
        with torch.inference_mode():
            losses.append(pipeline.eval_batch(batch(0)))
        pipeline.train_step(batch(1), optimizer, 1e-3)
        pipeline.settle()
        losses.append(pipeline.eval_batch(batch(0)))
        return [float(loss) for loss in losses]

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "post_validation": True}
    first, second = pipelines(2, layers, mse_loss, use, **arguments)
    assert first == second
    assert len(set(first)) == 3
