"""A step that turns out wrong: the executor runs the forwards before VALIDATE again, on every rank."""

from __future__ import annotations

import threading

import pytest
import torch
from toy_pipeline import FakeDevice, Pipeline, Problem, ToyStage, on_threads, over_nccl

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.schedule import Op, OpKind, StageCosts, lower, validate, with_post_validation
from megatron.zero_bubble.schedule.kinds import COMMUNICATION
from megatron.zero_bubble.schedule.step_ops import before_validation

LR = 0.1


class Optimizer:
    """Plain gradient descent for all ranks, whose steps of the iterations `wrong` are first taken the wrong way."""

    def __init__(self, problem: Problem, wrong: set[int]) -> None:
        self.problem, self.wrong = problem, wrong
        self.lock = threading.Lock()

    def step(self, stages: list[int], iteration: int) -> None:
        """Move the weights of these stages, ten times too far in an iteration whose step is to be amended."""
        self._move(stages, -LR * (10.0 if iteration in self.wrong else 1.0))

    def amend(self, stages: list[int], iteration: int) -> bool:
        if iteration not in self.wrong:
            return False
        with torch.no_grad():
            for stage in stages:
                for weight, before in zip(self.problem.weights[stage], self.saved[stage], strict=True):
                    weight.copy_(before).add_(weight.grad, alpha=-LR)
        return True

    def _move(self, stages: list[int], rate: float) -> None:
        with torch.no_grad():
            for stage in stages:
                self.saved[stage] = [weight.clone() for weight in self.problem.weights[stage]]
                for weight in self.problem.weights[stage]:
                    weight.add_(weight.grad, alpha=rate)

    saved: dict[int, list[torch.Tensor]]


class SteppingToyStage(ToyStage):
    """A toy stage that steps within the schedule."""

    optimizer: Optimizer
    iteration = 0
    restarts = 0

    def step(self) -> None:
        self.optimizer.step(self.stages, self.iteration)
        self.iteration += 1

    def validate(self) -> bool:
        was_wrong = self.iteration > 0 and self.optimizer.amend(self.stages, self.iteration - 1)
        self._zero_gradients()
        return was_wrong

    def restart(self) -> None:
        self.restarts += 1

    def _zero_gradients(self) -> None:
        for stage in self.stages:
            for weight in self.problem.weights[stage]:
                weight.grad = None


def with_optimizer(pipeline: Pipeline, wrong: set[int]) -> Pipeline:
    optimizer = Optimizer(pipeline.problem, wrong)
    optimizer.saved = {}
    for stage in pipeline.stages:
        stage.__class__ = SteppingToyStage
        stage.optimizer = optimizer
    return pipeline


def train_in_order(num_stages: int, num_microbatches: int, iterations: int) -> tuple[Problem, list[dict]]:
    """The same training in one process: gradients of all microbatches, then the right step."""
    problem, losses = Problem(num_stages, num_microbatches), []
    for _ in range(iterations):
        for stage in problem.weights:
            for weight in stage:
                weight.grad = None
        problem.run_by_autograd()
        losses.append(dict(problem.losses))
        with torch.no_grad():
            for stage in problem.weights:
                for weight in stage:
                    weight.add_(weight.grad, alpha=-LR)
    return problem, losses


def post_validated(name: str, p: int, m: int):
    schedule = generate(name, p, m)
    schedule = lower(with_post_validation(schedule, StageCosts.uniform(schedule.num_stages)))
    validate(schedule)
    return schedule


@pytest.mark.parametrize("wrong", [set(), {0}, {0, 1, 2}], ids=["none", "first", "all"])
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("p", "m", "seed"), [(2, 4, 0), (3, 6, 1), (4, 8, 2), (4, 8, 3)])
def test_training_is_that_of_right_steps(name, p, m, seed, wrong):
    """Losses and weights are equal bit for bit, whichever steps were wrong at first."""
    schedule = post_validated(name, p, m)
    pipeline = with_optimizer(over_nccl(schedule, seed), wrong)
    reference, losses = train_in_order(schedule.num_stages, m, iterations=3)
    for expected in losses:
        pipeline.run()
        assert all(torch.equal(pipeline.problem.losses[k], expected[k]) for k in range(m))
    for stage in pipeline.stages:
        stage.validate()  # the last step
        assert stage.restarts == len(wrong - {2})
    for ours, right in zip(pipeline.problem.weights, reference.weights, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


def test_only_what_stands_before_validation_runs_again():
    schedule = post_validated("zb-2p", 4, 8)
    pipeline = with_optimizer(on_threads(schedule), wrong={0})
    pipeline.run()
    for stage in pipeline.stages:
        stage.ran.clear()
    pipeline.run()
    for rank, stage in enumerate(pipeline.stages):
        again = [op for op in before_validation(schedule, rank) if op.kind is OpKind.F]
        computed = [op for op in schedule.ops[rank] if op.kind in (OpKind.F, OpKind.B, OpKind.W, OpKind.BW)]
        assert stage.ran == again + computed
        assert again == [Op(OpKind.F, m) for m in range(4 - rank)]


def test_where_a_gpu_is_while_it_runs_them_again():
    """The process has launched everything, while the device passes the operations before VALIDATE twice."""
    schedule, device = post_validated("zb-2p", 4, 8), FakeDevice()
    pipeline = with_optimizer(on_threads(schedule), wrong={0})
    pipeline.run()
    pipeline.run([OpRecorder(device)])
    computing = [index for index, op in enumerate(schedule.ops[0]) if op.kind not in COMMUNICATION]
    again = [index for index in computing if index < len(before_validation(schedule, 0))]
    assert len(again) == 4
    for done, index in enumerate([*again, *again, *computing[len(again) :]]):
        for has_begun in (False, True):
            device.reached = 2 * done + has_begun
            assert pipeline.executors[0].position() == (index, has_begun)
