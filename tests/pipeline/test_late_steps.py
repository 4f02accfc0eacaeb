"""Post-validation in a pipeline of plain layers gives the bits of optimizer steps that wait for all ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from rank_threads import accumulate, errors_on_ranks, pipeline_of, pipelines
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.runtime.rollback import Snapshot
from megatron.zero_bubble.schedule import Placement

WIDTH, NUM_STEPS = 6, 8


class Counting(torch.optim.Optimizer):
    """An optimizer that keeps its number of steps in the parameter group, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05), foreach=False),
    "counting": lambda parameters: Counting(parameters, {"lr": 0.05, "count": 0}),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def stack(num_layers: int) -> list[nn.Module]:
    torch.manual_seed(3)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    layers.insert(3, nn.BatchNorm1d(WIDTH))  # whose running means a repeated forward must not count twice
    return layers


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)


def halved(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def train_in_one_process(layers, make_optimizer, max_norm):
    """Return the model, and the loss and the norm of each step."""
    model = nn.Sequential(*copy.deepcopy(layers))
    optimizer = make_optimizer(model.parameters())
    scheduler, results = halved(optimizer), []
    for step in range(NUM_STEPS):
        loss = accumulate(model, mse_loss, batch(step), 4)
        results.append((loss, nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, results


def train_late(pipeline, make_optimizer, max_norm):
    """Return the rank's parameters and buffers, and the outcome of each step."""
    optimizer = make_optimizer(pipeline.parameters())
    scheduler = halved(optimizer)
    outcomes = []
    for step in range(NUM_STEPS):
        outcomes.append(pipeline.train_step(batch(step), optimizer, max_norm))
        scheduler.step()
    assert outcomes.pop(0) is None
    outcomes.append(pipeline.settle())
    assert pipeline.settle() is None
    pipeline.close()
    return pipeline.state_dict(), outcomes


CASES = [("zb-h1", 2, "adam"), ("zb-2p", 2, "momentum"), ("zb-v", 2, "tensor lr"), ("zb-h1", 2, "counting")]
OTHERS = [(s, p, o) for s in ("1f1b", "zb-h1", "zb-2p", "zb-v") for p in (2, 4) for o in OPTIMIZERS]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "optimizer"),
    CASES + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS if case not in CASES],
)
def test_late_steps_have_the_bits_of_steps_that_wait(schedule, num_ranks, optimizer):
    layers, make = stack(8), OPTIMIZERS[optimizer]
    _, free = train_in_one_process(layers, make, 1e9)
    max_norm = sorted(float(norm) for _, norm in free)[NUM_STEPS // 2]
    model, expected = train_in_one_process(layers, make, max_norm)
    assert {bool(norm > max_norm) for _, norm in expected} == {True, False}

    def train(pipeline):
        return train_late(pipeline, make, max_norm)

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform", "post_validation": True}
    parts = pipelines(num_ranks, layers, mse_loss, train, **arguments)
    clipped = [bool(norm > max_norm) for _, norm in expected]
    # A step waits, and so is not amended, if two of the four steps before it were clipped.
    amended = [now and sum(clipped[max(step - 4, 0) : step]) < 2 for step, now in enumerate(clipped)]
    assert sum(amended) < sum(clipped), "no wrong step waits"
    for state, outcomes in parts:
        assert [outcome.was_amended for outcome in outcomes] == amended
        for outcome, (loss, norm) in zip(outcomes, expected, strict=True):
            assert torch.equal(outcome.loss, loss)
            assert torch.equal(outcome.grad_norm, norm)
        for name, value in state.items():
            assert torch.equal(model.state_dict()[name], value), name


def test_without_post_validation_a_training_step_waits_and_returns_its_own_outcome():
    layers, make = stack(4), OPTIMIZERS["adam"]
    model, expected = train_in_one_process(layers, make, 0.1)

    def train(pipeline):
        optimizer = make(pipeline.parameters())
        scheduler = halved(optimizer)
        for step, (loss, norm) in enumerate(expected):
            outcome = pipeline.train_step(batch(step), optimizer, 0.1)
            scheduler.step()
            assert torch.equal(outcome.loss, loss)
            assert torch.equal(outcome.grad_norm, norm)
        return pipeline.state_dict()

    for state in pipelines(2, layers, mse_loss, train, schedule="zb-h1", num_microbatches=4):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_forwards_that_run_again_cast_the_new_weights_and_optimizers_step_without_autocast():
    steps_under_autocast = []

    def train(pipeline):
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        optimizer.register_step_pre_hook(lambda *_: steps_under_autocast.append(torch.is_autocast_enabled("cpu")))
        with torch.autocast("cpu", torch.bfloat16):
            outcomes = [pipeline.train_step(batch(step), optimizer, 0.05) for step in range(2)]
            return [outcome for outcome in (*outcomes, pipeline.settle()) if outcome is not None]

    arguments = {"schedule": "zb-h1", "num_microbatches": 4}
    for late, waiting in zip(
        *(pipelines(2, stack(4), mse_loss, train, **arguments, post_validation=late) for late in (True, False)),
        strict=True,
    ):
        assert all(outcome.was_amended for outcome in late)
        assert not any(steps_under_autocast)
        for ours, expected in zip(late, waiting, strict=True):
            assert torch.equal(ours.loss, expected.loss)
            assert torch.equal(ours.grad_norm, expected.grad_norm)


def test_parameters_that_a_load_has_assigned_are_clipped():
    def train(pipeline, assign: bool):
        pipeline.load_state_dict(pipeline.state_dict(), assign=assign)
        pipeline.train_step(batch(0), torch.optim.SGD(pipeline.parameters(), lr=0.5), 0.05)
        pipeline.settle()
        return pipeline.state_dict()

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "post_validation": True}
    loads = (lambda pipeline, assign=assign: train(pipeline, assign) for assign in (True, False))
    assigned, copied = (pipelines(2, stack(4), mse_loss, load, **arguments) for load in loads)
    for ours, expected in zip(assigned, copied, strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in ours.items())


def test_a_load_after_a_step_is_not_undone():
    def train(pipeline):
        start = {name: value.clone() for name, value in pipeline.state_dict().items()}
        pipeline.train_step(batch(0), torch.optim.SGD(pipeline.parameters(), lr=0.5), 0.05)
        pipeline.load_state_dict(start)
        assert all(torch.equal(value, start[name]) for name, value in pipeline.state_dict().items())

    pipelines(2, stack(4), mse_loss, train, schedule="zb-h1", num_microbatches=4, post_validation=True)


def test_a_copy_that_begins_before_the_step_has_the_changes_between_steps(monkeypatch):
    copies = {}

    def prepare(snapshot):
        (optimizer,) = snapshot._optimizers
        copies[snapshot] = [value.detach().clone() for group in optimizer.param_groups for value in group["params"]]

    def before_step(snapshot):
        (optimizer,) = snapshot._optimizers
        now = [value for group in optimizer.param_groups for value in group["params"]]
        assert all(torch.equal(value, copied) for value, copied in zip(now, copies.pop(snapshot, now), strict=True))

    monkeypatch.setattr(Snapshot, "prepare", prepare)
    monkeypatch.setattr(Snapshot, "before_step", before_step)

    def train(pipeline):
        optimizers = [torch.optim.SGD(pipeline.parameters(), lr=lr) for lr in (0.1, 0.2)]
        for step in range(4):
            pipeline.train_step(batch(step), optimizers[step % 2])
            pipeline.settle()
            with torch.no_grad():
                for parameter in pipeline.parameters():
                    parameter.mul_(0.5)

    pipelines(2, stack(4), mse_loss, train, schedule="zb-h1", num_microbatches=4, post_validation=True)


def test_forwards_that_run_again_draw_the_same_random_numbers():
    stage = LayerStage([[]], Placement("linear", 1), 0, mse_loss, torch.device("cpu"))
    stage.remember()
    drawn = torch.rand(4)
    stage.restart()
    assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (6, "a batch of 6 samples does not divide into 4 microbatches"),
        (
            8,
            "with post_validation all training steps need inputs of the same form, the same autocast and the same "
            "parameters that require gradients; before a change, call settle() and train_batch()",
        ),
    ],
)
@pytest.mark.parametrize("clips", [False, True])
def test_a_batch_that_cannot_be_used_ends_all_ranks_with_the_next_call(second, message, clips):
    """If the step before is clipped, forwards run again in the step with that batch."""
    layers = stack(4)

    def train(interconnect):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "post_validation": True}
        pipeline = pipeline_of(layers, mse_loss, interconnect, **arguments)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05)
        pipeline.train_batch(batch(0))
        norm = float(pipeline.clip_grad_norm_(math.inf))
        optimizer.zero_grad()
        pipeline.train_step(batch(0), optimizer, 0.999 * norm if clips else math.inf)
        pipeline.train_step(tuple(values[:second] for values in batch(1)), optimizer)
        pipeline.settle()

    errors = errors_on_ranks(2, train)
    assert {str(error) for error in errors} == {message}
    assert all(isinstance(error, ValueError) for error in errors)


class Failing(torch.optim.SGD):
    """Fails on rank 1 in the second step, after it has changed a parameter."""

    def step(self):
        super().step()
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2 and self.rank == 1:
            raise RuntimeError("no more\nmemory")


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("max_norm", [1e9, 1e-3])
def test_an_optimizer_that_fails_on_one_rank_ends_all_ranks(post_validation, max_norm):
    layers, states = stack(4), {}

    def train(interconnect):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "post_validation": post_validation}
        pipeline = pipeline_of(layers, mse_loss, interconnect, **arguments)
        optimizer = Failing(pipeline.parameters(), lr=0.05)
        optimizer.rank = interconnect.rank
        pipeline.train_step(batch(0), optimizer, max_norm)
        pipeline.settle()
        before = copy.deepcopy(pipeline.state_dict())
        try:
            pipeline.train_step(batch(1), optimizer, max_norm)
            pipeline.settle()
        finally:
            states[interconnect.rank] = before, pipeline.state_dict()

    errors = errors_on_ranks(2, train)
    assert {(type(error), str(error)) for error in errors} == {
        (ValueError, "Failing.step() failed: RuntimeError: no more memory")
    }
    assert isinstance(errors[1].__cause__, RuntimeError) or (post_validation and max_norm < 1)
    if post_validation and max_norm > 1:
        parameters = [(before[name], value) for before, now in states.values() for name, value in now.items()]
        assert all(torch.equal(*pair) for pair in parameters if pair[0].dim() > 1), "the step is undone"


class Decaying(torch.optim.SGD):
    """Adds the weight decay to the gradients themselves."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.data.add_(parameter.data, alpha=0.1)
        super().step()


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_change_before_a_step_is_amended_end_all_ranks(in_step, clips):
    _, [(_, norm), *_] = train_in_one_process(stack(4), OPTIMIZERS["sgd"], 1e9)
    max_norm, layers = 0.99 * float(norm) if clips else 1e9, stack(4)

    def train(interconnect):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "post_validation": True}
        pipeline = pipeline_of(layers, mse_loss, interconnect, **arguments)
        on_last = interconnect.rank == 1
        optimizer = (Decaying if on_last and in_step else torch.optim.SGD)(pipeline.parameters(), lr=0.05)
        for step in range(2):
            pipeline.train_step(batch(step), optimizer, max_norm)
            if on_last and not in_step:
                optimizer.zero_grad()

    message = (
        "with post_validation=True gradients may not change before the next step validates them: choose an optimizer "
        "whose step() does not change gradients, and call zero_grad() only after settle()"
    )
    found = [error and str(error) for error in errors_on_ranks(2, train)]
    assert found == [message if clips else None] * 2
