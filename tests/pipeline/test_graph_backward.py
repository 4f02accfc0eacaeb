"""A parameter's first gradient does not share memory with gradients that a deferred W or another stage still needs."""

from __future__ import annotations

import pytest
import torch
from rank_threads import gradients_of, merged, pipelines, run_in_one_process
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule

WIDTH = 6


class Shifted(nn.Module):
    """Adds parameters to its result through views, so that autograd gives them views of the result's gradient."""

    def __init__(self, num_shifts: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shifts = nn.ParameterList(torch.randn(WIDTH) for _ in range(num_shifts))

    def forward(self, x):
        return sum((shift.unsqueeze(0) for shift in self.shifts), start=self.linear(x))


class ShiftsInput(nn.Module):
    """Gives the gradient of its result to the stage before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x.view(1, WIDTH) + self.shift.view(1, WIDTH)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.left(x), self.right(x)


class AddsPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Shifted()

    def forward(self, pair):
        return pair[0].view(1, WIDTH) + self.inner(pair[1])


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


CASES = {
    "beside a split layer": lambda: [Shifted() for _ in range(4)],
    "two that share memory": lambda: [Shifted(2) for _ in range(4)],
    "at the start of a stage": lambda: [linear(), linear(), ShiftsInput(), linear()],
    "inside a layer that is split as a whole": lambda: [linear(), Pair(), AddsPair(), linear()],
}


MICROBATCHES = 4


def by_kind() -> Schedule:
    """All F, then B and W of one chunk after the other: a gradient waits on its rank while later ones are computed."""
    kinds = [(OpKind.F, 0), (OpKind.F, 1), *((kind, chunk) for chunk in (1, 0) for kind in (OpKind.B, OpKind.W))]
    ops = tuple(Op(kind, microbatch, chunk) for kind, chunk in kinds for microbatch in range(MICROBATCHES))
    return Schedule("by kind", Placement("v", 2, 2), MICROBATCHES, (ops, ops))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", by_kind()], ids=["1f1b", "zb-h1", "by kind"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case, schedule):
    torch.manual_seed(1)
    layers, batch = CASES[case](), tuple(torch.randn(2, MICROBATCHES, WIDTH))
    model, loss = run_in_one_process(layers, mse_loss, batch, MICROBATCHES)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    others = [Shifted] if "split as a whole" in case else []
    arguments = {"num_microbatches": MICROBATCHES, "partition": "uniform", "split_layers": others}
    found = merged(pipelines(2, layers, mse_loss, train, schedule=schedule, **arguments))
    wrong = [name for name, grad in gradients_of(model).items() if not torch.equal(found[name], grad)]
    assert not wrong
