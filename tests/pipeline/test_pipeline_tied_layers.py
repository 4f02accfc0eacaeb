"""Tied layers of a pipeline keep equal weights, whose gradient is the sum of the gradients of all copies."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_threads import accumulate, gradients_of, merged, pipelines
from small_layers import WIDTH, assert_equal, stack
from torch import nn

from megatron.zero_bubble import TiedLayerSpec


def times_weight(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


@pytest.mark.parametrize(("schedule", "assign"), [("zb-h1", False), ("zb-h1", True), ("zb-v", False)])
def test_tied_layers_get_the_sum_of_their_copies_gradients(schedule, assign):
    """Over two ranks, or on one rank twice, where the V has its first and its last stage."""

    class Table(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(7, WIDTH)
            with torch.no_grad():
                self.weight.copy_(torch.arange(7 * WIDTH).view(7, WIDTH).sin())

    layers, _ = stack(2)
    layers = [TiedLayerSpec("table", Table), *layers, TiedLayerSpec("table", Table, forward=times_weight)]
    batch = torch.randint(7, (8,)), torch.randint(7, (8,))
    first, last = Table(), Table()
    model = nn.Sequential(first, *copy.deepcopy(layers[1:-1]))
    for _ in range(2):
        accumulate(lambda x: times_weight(last, model(x)), nn.functional.cross_entropy, batch, 4)
    # The copies' gradients of every step are added before those of the next step are.
    expected = gradients_of(model)
    del expected["0.weight"]
    one_step = (first.weight.grad + last.weight.grad) / 2
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in (2 * one_step, *expected.values())]))

    def train(pipeline):
        pipeline.load_state_dict(pipeline.state_dict(), assign=assign)
        for _ in range(2):
            pipeline.train_batch(batch)
        grads = gradients_of(pipeline)
        assert torch.allclose(pipeline.clip_grad_norm_(1e9), norm)
        return grads

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform"}
    found = merged(pipelines(2, layers, nn.functional.cross_entropy, train, **arguments))
    assert torch.equal(found["0.weight"], found["5.weight"])
    assert torch.allclose(found["0.weight"], 2 * one_step, atol=1e-6)
    assert_equal({name: grad for name, grad in found.items() if name in expected}, expected)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_tied_parameter_gets_a_gradient_only_if_one_of_its_copies_has_one(schedule):
    """Otherwise an optimizer would decay it. Freezing it keeps its gradient of earlier steps."""
    layers, batch = stack(2)
    forwards = (times_weight, lambda module, x: x)
    ends = [TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH, forward=forward) for forward in forwards]
    layers = [ends[0], *layers, ends[1]]

    def train(pipeline):
        gradients = []
        for thaw in (True, False, True):
            weights = [weight for name, weight in pipeline.named_parameters() if name in ("0.weight", "5.weight")]
            for weight in weights:
                weight.requires_grad_(thaw)
            pipeline.train_batch(batch)
            gradients += [[weight.grad.clone() for weight in weights]]
        biases = [grad for name, grad in gradients_of(pipeline).items() if name in ("0.bias", "5.bias")]
        assert biases == [None] * len(weights)
        return gradients

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform"}
    steps = zip(*pipelines(2, layers, nn.functional.mse_loss, train, **arguments), strict=True)
    (expected, *of_first), *others = ([grad for part in parts for grad in part] for parts in steps)
    assert expected.any()
    for times, gradients in zip((1, 1, 2), (of_first, *others), strict=True):
        assert all(torch.equal(grad, times * expected) for grad in gradients)


def test_the_state_of_layers_that_are_tied_on_one_stage_can_be_loaded():
    layers = [
        TiedLayerSpec("both", nn.Linear, WIDTH, WIDTH),
        *stack(1)[0],
        TiedLayerSpec("both", nn.Linear, WIDTH, WIDTH),
    ]
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    other = {f"{index}.{name}": torch.rand(shape) for index in (0, 1, 3) for name, shape in shapes.items()}
    other.update({f"3.{name}": other[f"0.{name}"] for name in shapes})

    def load(pipeline):
        pipeline.load_state_dict(other)
        return pipeline.full_state_dict()

    for partition in ([4], [1]):
        for state in pipelines(
            2, [*layers, nn.Tanh()], nn.functional.mse_loss, load, schedule="1f1b", partition=partition
        ):
            assert_equal(state, other)


@pytest.mark.parametrize(
    ("schedule", "partition", "assign"), [("1f1b", [4], False), ("1f1b", [1], False), ("zb-v", "uniform", True)]
)
def test_a_tied_layer_that_a_state_lacks_gets_the_values_of_another_layer_with_its_key(schedule, partition, assign):
    """Checkpoints of models with tied embeddings lack the weight of the output layer."""
    both = TiedLayerSpec("both", nn.Linear, WIDTH, WIDTH)
    layers = [both, *stack(1)[0], both, nn.Tanh()]

    def load(pipeline):
        state = {name: torch.rand_like(value) for name, value in sorted(pipeline.full_state_dict().items())}
        pipeline.load_state_dict({name: state[name] for name in state if not name.startswith("3.")}, assign=assign)
        memory = {parameter.data_ptr() for parameter in pipeline.parameters()}
        assert len(memory) == len(list(pipeline.parameters())), "an optimizer would change a copy twice"
        return {name: state[name.replace("3.", "0.")] for name in state}, pipeline.state_dict()

    for expected, own in pipelines(2, layers, nn.functional.mse_loss, load, schedule=schedule, partition=partition):
        assert_equal(own, {name: expected[name] for name in own})


@pytest.mark.parametrize("first_step", ["train_batch", "eval_batch"])
def test_copies_with_other_random_numbers_are_equal_from_the_first_step_on(first_step):
    both = TiedLayerSpec("both", nn.Linear, WIDTH, WIDTH)
    layers, batch = stack(1)

    def use(pipeline):
        pipeline.apply(lambda module: [parameter.data.normal_() for parameter in module.parameters(recurse=False)])
        getattr(pipeline, first_step)(batch)
        return pipeline.state_dict()

    arguments = {"schedule": "1f1b", "num_microbatches": 4, "partition": [2]}
    found = merged(pipelines(2, [both, *layers, both], nn.functional.mse_loss, use, **arguments))
    assert torch.equal(found["0.weight"], found["3.weight"])
    assert torch.equal(found["0.bias"], found["3.bias"])
