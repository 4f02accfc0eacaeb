"""Microbatches of any shapes: loss and gradients are those of one process, and a misfit is one line on all ranks."""

from __future__ import annotations

import copy
import itertools
from random import Random

import pytest
import torch
from rank_threads import accumulate_pairs, error_of, errors_on_ranks, gradients_of, merged, pipeline_of, pipelines
from test_pipeline_numerics import SCHEDULES, assert_equal
from torch import nn
from torch.nn.functional import mse_loss

WIDTH = 6
NUM_MICROBATCHES = 4


class Split(nn.Module):
    """Makes a dict of two tensors, one of which has another number of dimensions and one gradient less."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return {"x": self.inner(x), "order": x.flatten(0, -2).sum(1).argsort(), "note": 2.0}


class Join(nn.Module):
    def forward(self, parts):
        return parts["x"] * parts["order"].float().mean() * parts["note"]


class KeepPositive(nn.Module):
    """Drops rows that only the data tells, perhaps all of them."""

    def forward(self, x):
        x = x.flatten(0, -2)
        return x[x.sum(1) > 0]


def layers() -> list[nn.Module]:
    torch.manual_seed(2)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    return [*linears[:3], nn.Tanh(), *linears[3:5], Split(), Join(), *linears[5:]]


def random_microbatches(random: Random, num_microbatches: int = NUM_MICROBATCHES):
    """Pairs of inputs and targets: the batch, the length, both, or the number of dimensions changes."""
    lengths = [random.choice([1, 2, 3, 7, 12]) for _ in range(3)]
    shapes = [(lengths[0], lengths[1]), (lengths[0], lengths[2]), (lengths[2], lengths[1]), (lengths[1],)]
    chosen = [random.choice(shapes) for _ in range(num_microbatches)]
    return [(torch.randn(*shape, WIDTH), torch.randn(*shape, WIDTH)) for shape in chosen]


def assert_like_one_process(num_ranks: int, random: Random, num_steps: int, **arguments) -> None:
    steps = [random_microbatches(random) for _ in range(num_steps)]
    model = nn.Sequential(*layers())
    losses, gradients = [], []
    for pairs in steps:
        losses.append(accumulate_pairs(model, mse_loss, pairs))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})

    def train(pipeline):
        found = []
        for pairs, loss in zip(steps, losses, strict=True):
            assert torch.equal(pipeline.train_batch(iter(pairs)), loss)
            found.append({name: grad.clone() for name, grad in gradients_of(pipeline).items()})
        return found

    arguments = {"num_microbatches": NUM_MICROBATCHES, "partition": "uniform", "microbatch_order": "data", **arguments}
    of_ranks = pipelines(num_ranks, layers(), mse_loss, train, **arguments)
    for step, expected in enumerate(gradients):
        assert_equal(merged([found[step] for found in of_ranks]), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_and_gradients_are_those_of_one_process(schedule):
    for num_ranks in (2, 4):
        assert_like_one_process(num_ranks, Random(f"{schedule} {num_ranks}"), num_steps=2, schedule=schedule)


# Two sequences of every schedule run above, and a thousand of its messages in tests/runtime/test_variable_shapes.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_hundred_sequences_of_shapes(schedule):
    assert_like_one_process(4, Random(schedule), num_steps=100, schedule=schedule)


def test_checkpointed_layers_evaluation_and_a_shorter_last_microbatch():
    model = nn.Sequential(*layers())
    pairs = [(torch.randn(size, 5, WIDTH), torch.randn(size, 5, WIDTH)) for size in (3, 3, 3, 1)]
    with torch.no_grad():
        evaluated = accumulate_pairs(model, mse_loss, pairs)
    trained = accumulate_pairs(model, mse_loss, pairs)

    def use(pipeline):
        assert torch.equal(pipeline.eval_batch(iter(pairs)), evaluated)
        assert torch.equal(pipeline.train_batch(iter(pairs)), trained)
        return gradients_of(pipeline)

    arguments = {"num_microbatches": NUM_MICROBATCHES, "schedule": "zb-v", "checkpoint": True}
    assert_equal(merged(pipelines(2, layers(), mse_loss, use, **arguments)), gradients_of(model))


def of_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


def test_layers_may_change_shapes_by_what_is_in_the_data():
    own = [*layers()[:2], KeepPositive(), *layers()[:4]]
    pairs = [(torch.randn(9, WIDTH), torch.randn(WIDTH)) for _ in range(3)]
    pairs.append((-torch.ones(9, WIDTH), torch.randn(WIDTH)))
    with torch.no_grad():
        own[0].weight.copy_(torch.eye(WIDTH))
        own[1].weight.copy_(torch.eye(WIDTH))
        own[0].bias.zero_()
        own[1].bias.zero_()
    model = nn.Sequential(*copy.deepcopy(own))
    assert model[:3](pairs[3][0]).shape == (0, WIDTH)
    loss = accumulate_pairs(model, of_rows, pairs)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(iter(pairs)), loss)
        return gradients_of(pipeline)

    arguments = {"num_microbatches": 4, "schedule": "zb-h1", "partition": [3], "variable_shapes": True}
    assert_equal(merged(pipelines(2, own, of_rows, train, **arguments)), gradients_of(model))


class InFloat64(nn.Module):
    """Changes the type of microbatches of one length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x):
        return x.double() if len(x) == self.length else x


def lines_of(own, steps, num_ranks=4, **arguments) -> list[str]:
    """Return the messages of the steps that fail, which are the same on all ranks."""
    arguments = {"num_microbatches": 4, "partition": "uniform", **arguments}

    def run(interconnect) -> None:
        pipeline = pipeline_of(own, of_rows, interconnect, **arguments)
        found = []
        for pairs in steps:
            try:
                pipeline.train_batch(iter(pairs))
            except ValueError as error:
                found.append(str(error))
        raise ValueError("\n".join(found))

    errors = errors_on_ranks(num_ranks, run)
    assert len({str(error) for error in errors}) == 1, errors
    return str(errors[0]).splitlines()


def pairs_of(*lengths: int, dtypes=()):
    return [
        (torch.randn(length, WIDTH, dtype=dtype), torch.randn(WIDTH))
        for length, dtype in itertools.zip_longest(lengths, dtypes, fillvalue=torch.float32)
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-zb"])
def test_what_a_stage_cannot_take_is_one_line_on_all_ranks_and_the_next_step_runs(schedule):
    own = [nn.Linear(WIDTH, WIDTH), InFloat64(5), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Flatten(1)]
    own.append(nn.Linear(WIDTH, WIDTH))
    cube = torch.randn(2, 3, WIDTH), torch.randn(WIDTH)
    steps = [pairs_of(2, 3, 5, 5), pairs_of(1, 2, 3, 4), [*pairs_of(1, 2, 3), cube], pairs_of(2, 2, 2, 2)]
    in_float64, in_cube = lines_of(own, steps, schedule=schedule)
    sender = 0 if schedule in ("1f1b", "zb-h1") else 1
    assert in_float64 == f"microbatch 2: stage {sender} sends float64[5, 6], but the next stage expects float32[any]"
    assert in_cube == f"microbatch 3: layer 7 (Linear) failed: {error_of(own[-1], (2, 3 * WIDTH))}"


def test_inputs_of_several_types_are_refused_before_the_step():
    [line] = lines_of(layers(), [pairs_of(2, 2, 3, 2, dtypes=[torch.float32, torch.float64])], schedule="zb-h1")
    assert line == (
        "the inputs of microbatch 1 are float64[2, 6], those of microbatch 0 are float32[2, 6]: all microbatches of a "
        "step need the same structure and types"
    )


def test_a_constant_that_varies_is_named():
    own = [lambda x: (x, x.shape[0]), lambda pair: pair[0] / pair[1], *(nn.Linear(WIDTH, WIDTH) for _ in range(2))]
    [line] = lines_of(own, [pairs_of(2, 2, 3, 2)], num_ranks=2, schedule="zb-h1", partition=[1])
    assert line == (
        "microbatch 2: stage 0 sends (float32[3, 6], 3), but the next stage expects (float32[any], 2): numbers and "
        "strings must be equal in all microbatches, so send a tensor"
    )


def test_shapes_that_the_inputs_do_not_show_need_the_keyword():
    own = [KeepPositive(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))]
    pairs = [(x.abs(), y) for x, y in pairs_of(9, 9, 9, 9)]
    pairs[2][0][4] = -1.0
    [line] = lines_of(own, [pairs], num_ranks=2, schedule="zb-h1")
    assert line == (
        "microbatch 2: stage 0 sends float32[8, 6], but the next stage expects float32[9, 6]: give "
        "variable_shapes=True if layers change shapes beyond those of the inputs"
    )
