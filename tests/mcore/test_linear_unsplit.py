"""Which gradients stay in B, by what holds the parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from deferring_layer import DeferringLayers
from split_layers import HIDDEN, OUTPUT, Layers, one_rank

from megatron.zero_bubble.mcore.linear import count_gradients, split_weight_gradients
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


class Router(torch.nn.Module):
    """A weight in a module that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, HIDDEN))


class GatedLayers(Layers):
    """Layers with a gate, as megatron-core's shared experts; `backward_dw()` is for the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_weight = torch.nn.Parameter(torch.zeros(1, HIDDEN))

    def backward_dw(self) -> None: ...


def stage() -> torch.nn.Module:
    """Two layers with a router each, an embedding and a norm."""
    parts = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(8, HIDDEN), "norm": torch.nn.LayerNorm(HIDDEN)})
    parts["layers"] = torch.nn.ModuleList(torch.nn.ModuleDict({"mlp": Layers(), "router": Router()}) for _ in range(2))
    return parts


def test_every_parameter_is_counted_where_its_gradient_is_computed():
    model = stage()
    split_weight_gradients([model], WeightGradStore())
    gradients = count_gradients([model])
    assert gradients.in_w == 2 * 2 * HIDDEN * OUTPUT
    assert gradients.embeddings == 8 * HIDDEN
    assert gradients.vectors == 2 * HIDDEN + 2 * (HIDDEN + OUTPUT)
    assert gradients.unsplit == (("layers.*.router (Router)", 2 * 4 * HIDDEN),)
    assert gradients.total == sum(parameter.numel() for parameter in model.parameters())


def test_a_linear_layer_that_was_not_split_is_named_and_frozen_weights_are_not():
    model = Layers(bias=False)
    model.row.weight.requires_grad_(False)
    gradients = count_gradients([model])
    assert gradients.unsplit == (("column (ColumnParallelLinear)", HIDDEN * OUTPUT),)
    assert gradients.missed == ("column (ColumnParallelLinear)",)


def test_a_layer_whose_setting_keeps_w_in_b_is_named_and_not_missed():
    model = Layers()
    model.column.output_dtype = torch.float64
    split_weight_gradients([model], WeightGradStore())
    gradients = count_gradients([model])
    assert gradients.unsplit == (("column (ColumnParallelLinear)", HIDDEN * OUTPUT),)
    assert gradients.missed == ()


def test_megatron_cores_layers_whose_deferral_is_empty_are_named_and_not_missed():
    class GroupedMLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight1 = torch.nn.Parameter(torch.zeros(HIDDEN, OUTPUT))

        def backward_dw(self) -> None: ...

    gradients = count_gradients([torch.nn.ModuleDict({"experts": GroupedMLP()})])
    assert gradients.unsplit == (("experts (GroupedMLP)", HIDDEN * OUTPUT),)
    assert gradients.missed == ()


def test_layers_that_offer_to_defer_w_and_do_not_are_missed_and_others_are_not():
    parts = {
        "deferring": DeferringLayers(),
        "offering": DeferringLayers(delay_wgrad_compute=False),
        "plain": torch.nn.Linear(HIDDEN, OUTPUT),
        "convolution": torch.nn.Conv1d(HIDDEN, HIDDEN, 4, groups=HIDDEN),
        "router": Router(),
        "shared_experts": GatedLayers(),
    }
    model = torch.nn.ModuleDict(parts)
    split_weight_gradients([model], WeightGradStore())
    gradients = count_gradients([model])
    assert gradients.in_w == 4 * HIDDEN * OUTPUT
    assert gradients.missed == (
        "offering.first (DeferringLinear)",
        "offering.second (DeferringLinear)",
        "plain (Linear)",
    )
    assert {name for name, _ in gradients.unsplit} - set(gradients.missed) == {
        "convolution (Conv1d)",
        "router (Router)",
        "shared_experts (GatedLayers)",
    }


def test_the_names_are_those_inside_the_wrappers():
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    [(name, _)] = count_gradients([Wrapper(Wrapper(torch.nn.ModuleDict({"gate": Router()})))]).unsplit
    assert name == "gate (Router)"
