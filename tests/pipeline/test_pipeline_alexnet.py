"""AlexNet's layers, as the example has them: partitions, and the bits of one process under every schedule."""

from __future__ import annotations

import runpy
from itertools import combinations, pairwise

import pytest
import torch
from rank_threads import accumulate, gradients_of, merged, pipelines, run_in_one_process
from torch import nn
from torch.nn.functional import cross_entropy

from megatron.zero_bubble import LayerSpec, PipelineOptions
from megatron.zero_bubble.pipeline import stage_layout
from megatron.zero_bubble.pipeline.stage_layout import LayoutRequest, StageLayout
from megatron.zero_bubble.planner import names
from tests.launch import ROOT

SCHEDULES = [name for name in names() if name != "optimal"]
NOT_EXHAUSTIVE = [("zb-v", 2), ("dualpipe-v", 4)]
"""The schedule and ranks of every run, and those that need more than the four microbatches of these tests."""


@pytest.fixture(scope="module")
def layers() -> list[LayerSpec]:
    pytest.importorskip("skimage")
    return runpy.run_path(str(ROOT / "examples" / "alexnet.py"))["LAYERS"]


def narrow(layers: list[LayerSpec]) -> list[LayerSpec]:
    """Return the same layers with an eighth of the channels and fewer features, which take small images."""
    sizes = {64: 8, 192: 24, 384: 48, 256: 32, 256 * 6 * 6: 32 * 6 * 6, 4096: 64}

    def smaller(spec: LayerSpec) -> LayerSpec:
        return LayerSpec(spec.layer_class, *(sizes.get(size, size) for size in spec.args), **spec.kwargs)

    return [smaller(spec) if spec.layer_class in (nn.Conv2d, nn.Linear) else spec for spec in layers]


def layout(layers: list[LayerSpec], partition: str, num_stages: int, example: object = None) -> StageLayout:
    options = PipelineOptions(partition=partition, example=example)
    return LayoutRequest(layers, cross_entropy, "zb-h1", 4, options, num_stages, torch.device("cpu")).layout()


def smallest_load(weights: list[float], num_stages: int) -> float:
    """Try all partitions; return the smallest largest load."""
    cuts = combinations(range(1, len(weights)), num_stages - 1)
    partitions = [(0, *cut, len(weights)) for cut in cuts]
    return min(max(sum(weights[a:b]) for a, b in pairwise(partition)) for partition in partitions)


def images(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, size, size, generator=generator), torch.randint(6, (count,), generator=generator)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_no_partition_has_less_parameters_on_its_largest_stage(layers, num_stages):
    weights = [stage_layout.num_parameters(*entry) for entry in enumerate(layers)]
    assert sum(weights) == 57_028_422  # AlexNet's, with six classes
    found = layout(layers, "parameters", num_stages)
    assert list(found.loads) == [sum(weights[a:b]) for a, b in pairwise(found.boundaries)]
    assert max(found.loads) == smallest_load(weights, num_stages)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_no_partition_has_a_faster_slowest_stage_by_the_measured_times(layers, num_stages, monkeypatch):
    measured = []

    def measure(*arguments):
        measured.extend(measure_layers(*arguments))
        return measured

    measure_layers = stage_layout.measure_layers
    monkeypatch.setattr(stage_layout, "measure_layers", measure)
    found = layout(narrow(layers), "profile", num_stages, images(2, 64))
    weights = [sum(times) for times in measured]
    assert len(weights) == len(layers)
    assert all(weight > 0 for weight in weights)
    assert found.loads == pytest.approx([sum(weights[a:b]) for a, b in pairwise(found.boundaries)])
    assert max(found.loads) == pytest.approx(smallest_load(weights, num_stages))


def assert_gradients_of_one_process(layers, num_ranks, schedule, partition, batch):
    torch.manual_seed(1)
    modules = [spec.build() for spec in layers]
    model, loss = run_in_one_process(modules, cross_entropy, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": partition}
    found, expected = merged(pipelines(num_ranks, modules, cross_entropy, train, **arguments)), gradients_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


# All schedules on layers of AlexNet's kinds: test_pipeline_numerics.py.
@pytest.mark.parametrize(
    ("schedule", "num_ranks"),
    [("zb-v", 2)]
    + [
        pytest.param(s, p, marks=pytest.mark.exhaustive)
        for s in SCHEDULES
        for p in (2, 4)
        if (s, p) not in NOT_EXHAUSTIVE
    ],
)
def test_gradients_are_those_of_one_process(layers, schedule, num_ranks):
    assert_gradients_of_one_process(narrow(layers), num_ranks, schedule, "type:conv|linear", images(8, 64))


@pytest.mark.exhaustive  # the layers at their full size: 57 million parameters
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_gradients_of_the_full_size_are_those_of_one_process(layers, schedule):
    assert_gradients_of_one_process(layers, 2, schedule, "parameters", images(8, 224))


@pytest.mark.exhaustive  # test_pipeline_llama.py has ten clipped steps, too
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parameters_are_equal_after_ten_clipped_steps(layers, num_ranks):
    torch.manual_seed(1)
    modules, batch = [spec.build() for spec in narrow(layers)], images(8, 64)
    model = nn.Sequential(*(spec.build() for spec in narrow(layers)))
    model.load_state_dict(nn.Sequential(*modules).state_dict())

    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    optimizer, norms = sgd(model), []
    for _ in range(10):
        accumulate(model, cross_entropy, batch, 4)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.05, "a step was not clipped"

    def train(pipeline):
        optimizer = sgd(pipeline)
        for norm in norms:
            pipeline.train_batch(batch)
            assert torch.equal(pipeline.clip_grad_norm_(0.05), norm)
            optimizer.step()
            optimizer.zero_grad()
        return pipeline.state_dict()

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "type:conv|linear"}
    trained = merged(pipelines(num_ranks, modules, cross_entropy, train, **arguments))
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
