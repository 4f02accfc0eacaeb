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
    """A linear layer whose B, W or R fails in the microbatches whose inputs are above 1."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.inner, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        is_broken = bool(x.detach().max() > 1)
        if is_broken and self.kind == "R" and torch.is_grad_enabled():
            raise RuntimeError("another\n  result")
        x = x.tanh()
        result = self.inner(x)
        if is_broken and self.kind == "W":
            x.detach().add_(1)  # which only W reads again
        return Raises.apply(result) if is_broken and self.kind == "backward" else result


def scaled_from(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch in which the inputs of `microbatch` and all later ones are above 1."""
    inputs, targets = BATCH
    return inputs * (0.5 + (torch.arange(8) >= 2 * microbatch))[:, None], targets


def position(kind: str) -> int:
    """Return the index of the layer that breaks: on the rank that computes the operation apart from any other."""
    return 0 if kind == "R" else 2


CASES = [
    ("backward", "zb-h1", "microbatch 2: backward of stage 1 failed: RuntimeError: no derivative"),
    ("backward", "1f1b", "microbatch 2: backward of stage 1 failed: RuntimeError: no derivative"),
    ("W", "zb-h1", "microbatch 2: W of stage 1 failed: RuntimeError: one of the variables needed for gradient"),
]


OPTIONS = [{}, {"post_validation": True}, {"checkpoint": True}]
RUNS = [(*case, options) for case in CASES for options in OPTIONS]
R_FAILED = "microbatch 2: recomputation of stage 0 failed: RuntimeError: another result"
RUNS += [("R", "zb-h1", R_FAILED, {"checkpoint": True, "post_validation": validates}) for validates in (False, True)]


@pytest.mark.parametrize(("kind", "schedule", "message", "options"), RUNS)
def test_the_first_failed_microbatch_is_named_on_all_ranks(kind, schedule, message, options):
    layers = [nn.Identity(), nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[position(kind)] = Breaks(kind)

    def train(interconnect):
        arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform", **options}
        pipeline = pipeline_of(layers, mse_loss, interconnect, **arguments)
        if options.get("post_validation"):
            pipeline.train_step(scaled_from(2), torch.optim.SGD(pipeline.parameters(), lr=0.1))
            pipeline.settle()
        else:
            pipeline.train_batch(scaled_from(2))

    errors = errors_on_ranks(2, train)
    assert [type(error) for error in errors] == [ValueError] * 2
    assert all(str(error).startswith(message) for error in errors), errors
    assert "\n" not in str(errors[0])


@pytest.mark.parametrize("kind", ["backward", "W", "R"])
def test_a_step_after_a_failed_one_has_the_gradients_of_one_process(kind):
    torch.manual_seed(2)
    layers = [nn.Identity(), nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[position(kind)] = Breaks(kind)
    good = scaled_from(4)
    model, _ = run_in_one_process(layers, mse_loss, good, 4)

    def train(pipeline):
        with pytest.raises(ValueError, match="microbatch 1: "):
            pipeline.train_batch(scaled_from(1))
        pipeline.zero_grad()
        pipeline.train_batch(good)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform", "checkpoint": kind == "R"}
    found = merged(pipelines(2, layers, mse_loss, train, **arguments))
    for name, grad in gradients_of(model).items():
        assert (found[name] is None) == (grad is None), name
        assert grad is None or torch.equal(found[name], grad), name


def test_the_first_failure_is_the_one_of_the_lowest_microbatch_and_of_its_lowest_stage():
    failures = [Failure(2, 0, "a"), Failure(1, 1, "c"), Failure(1, 0, "recomputation"), Failure(1, 0, "backward")]
    assert Failure.first_of(failures).problem == "recomputation"
    assert Failure.first_of([]) is None
