"""A backward that fails on one rank is one line on all ranks, and the pipeline can train on."""

from __future__ import annotations

import pytest
import torch
from rank_threads import errors_on_ranks, gradients_of, merged, pipeline_of, pipelines, run_in_one_process
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble.pipeline.failures import Failure

BATCH = torch.ones(8, 4), torch.zeros(8, 4)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no\n  derivative")


class Breaks(nn.Linear):
    """A linear layer whose B or W fails in the microbatches whose inputs are above 1."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.inner, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        is_broken = bool(x.detach().max() > 1)
        x = x.tanh()
        result = self.inner(x)
        if is_broken and self.kind == "W":
            x.detach().add_(1)  # which only W reads again
        return Raises.apply(result) if is_broken and self.kind == "backward" else result


def scaled_from(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch in which the inputs of `microbatch` and all later ones are above 1."""
    inputs, targets = BATCH
    return inputs * (0.5 + (torch.arange(8) >= 2 * microbatch))[:, None], targets


CASES = [
    ("backward", "zb-h1", "microbatch 2: backward of stage 1 failed: RuntimeError: no derivative"),
    ("backward", "1f1b", "microbatch 2: backward of stage 1 failed: RuntimeError: no derivative"),
    ("W", "zb-h1", "microbatch 2: W of stage 1 failed: RuntimeError: one of the variables needed for gradient"),
]


@pytest.mark.parametrize(("kind", "schedule", "message"), CASES)
@pytest.mark.parametrize("options", [{}, {"post_validation": True}, {"checkpoint": True}], ids=str)
def test_the_first_failed_microbatch_is_named_on_all_ranks(kind, schedule, message, options):
    layers = [nn.Identity(), nn.Identity(), Breaks(kind), nn.Linear(4, 4)]

    def train(interconnect):
        arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform", **options}
        pipeline = pipeline_of(layers, mse_loss, interconnect, **arguments)
        if "post_validation" in options:
            pipeline.train_step(scaled_from(2), torch.optim.SGD(pipeline.parameters(), lr=0.1))
            pipeline.settle()
        else:
            pipeline.train_batch(scaled_from(2))

    errors = errors_on_ranks(2, train)
    assert [type(error) for error in errors] == [ValueError] * 2
    assert all(str(error).startswith(message) for error in errors), errors
    assert "\n" not in str(errors[0])


@pytest.mark.parametrize("kind", ["backward", "W"])
def test_a_step_after_a_failed_one_has_the_gradients_of_one_process(kind):
    torch.manual_seed(2)
    layers = [nn.Linear(4, 4), nn.Identity(), Breaks(kind), nn.Linear(4, 4)]
    with torch.no_grad():
        layers[0].weight.copy_(torch.eye(4))
        layers[0].bias.zero_()
    good = scaled_from(4)
    model, _ = run_in_one_process(layers, mse_loss, good, 4)

    def train(pipeline):
        with pytest.raises(ValueError, match="microbatch 1: "):
            pipeline.train_batch(scaled_from(1))
        pipeline.zero_grad()
        pipeline.train_batch(good)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform"}
    found = merged(pipelines(2, layers, mse_loss, train, **arguments))
    for name, grad in gradients_of(model).items():
        assert (found[name] is None) == (grad is None), name
        assert grad is None or torch.equal(found[name], grad), name


def test_failures_are_in_the_order_of_microbatches():
    assert min([Failure(2, 0, "a"), Failure(1, 1, "c"), Failure(1, 0, "b")]).problem == "b"
