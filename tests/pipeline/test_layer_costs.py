"""The measurement of layers leaves the layers as they were."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune

from megatron.zero_bubble import LayerSpec
from megatron.zero_bubble.pipeline.layer_costs import measure_layers

CPU, EXAMPLE = torch.device("cpu"), (torch.randn(4, 6), torch.randn(4, 6))


def pruned() -> nn.Module:
    """A linear layer whose weight is computed from other tensors, and no leaf of the graph."""
    return prune.random_unstructured(nn.Linear(6, 6), "weight", 0.5)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


@pytest.mark.parametrize("make", [normed, pruned])
@pytest.mark.parametrize("layer_of", [lambda module: module, lambda module: LayerSpec(nn.Sequential, module)])
def test_gradients_and_buffers_stay(make, layer_of):
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    times = measure_layers([layer_of(module), nn.Linear(6, 6)], mse_loss, EXAMPLE, CPU)
    assert [min(of_layer) > 0 for of_layer in times] == [True, True]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any("forward" in vars(each) for each in module.modules()), "a module is split"


class Placed(nn.Linear):
    """A layer that records that it was moved, even if its container was moved."""

    def _apply(self, *given, **options):
        self.moved = True
        return super()._apply(*given, **options)


@pytest.mark.parametrize("layer_of", [lambda module: module, lambda module: LayerSpec(nn.Sequential, module)])
def test_a_layer_stays_on_its_device(layer_of):
    module = Placed(6, 6)
    measure_layers([layer_of(module), nn.Linear(6, 6)], mse_loss, EXAMPLE, CPU)
    assert not hasattr(module, "moved")


class Moved(torch.Tensor):
    """Records the devices to which its instances are copied."""

    devices: ClassVar[list[torch.device]] = []

    def to(self, device, *arguments, **options):
        self.devices.append(device)
        return super().to(device, *arguments, **options)


def test_the_example_is_copied_to_the_device_of_the_layers():
    """As batches are, so that an example may come from a data loader."""
    measure_layers([nn.Linear(6, 6)], mse_loss, tuple(tensor.as_subclass(Moved) for tensor in EXAMPLE), CPU)
    assert Moved.devices == [CPU] * 2


def test_dropout_of_the_training_draws_as_without_the_measurement():
    layers = [nn.Linear(6, 6), nn.Dropout(0.5)]
    state = torch.get_rng_state()
    measure_layers(layers, mse_loss, EXAMPLE, CPU)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_that_cannot_be_copied_is_named():
    layer = nn.Linear(6, 6)
    layer.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"^partition='profile': layer 1 \(Linear\) failed: TypeError: cannot pickle"):
        measure_layers([nn.Linear(6, 6), layer], mse_loss, EXAMPLE, CPU)
