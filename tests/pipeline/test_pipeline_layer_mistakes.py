"""Layers that a pipeline cannot run are named in one line on all ranks."""

from __future__ import annotations

import pytest
import torch
from rank_threads import error_of
from refused_pipelines import X, Y, assert_message, linears
from torch import nn

from megatron.zero_bubble import LayerSpec, TiedLayerSpec


class Nothing(nn.Module):
    def forward(self, x):
        return None


class Teacher(nn.Linear):
    """Changes a frozen weight in its forward, as averages of weights do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.average = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.weight, 0.1)
        return super().forward(x) + x @ self.average


def broken() -> nn.Module:
    raise RuntimeError("no such\n  thing")


ON_META = nn.Linear(4, 4, device="meta")


def error_of_move(module: nn.Module) -> str:
    """Return torch's error for a module that cannot be moved to the device of the pipeline."""
    with pytest.raises(NotImplementedError) as error:
        module.to("cpu")
    return f"NotImplementedError: {error.value}"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Nothing(), "layer 1 (Nothing) returned None, not the input of the next layer"),
        (
            nn.Linear(3, 4),
            f"layer 1 (Linear) failed: {error_of(nn.Linear(3, 4), (2, 4))}",
        ),
        (Teacher(), "layer 1 (Teacher) changes its parameter average in its forward: make the parameter a buffer"),
        (
            lambda x: object(),
            "layer 1 (<lambda>), the last of stage 0: a object cannot pass between stages: give tensors, numbers, "
            "strings or None, in tuples, lists and dicts",
        ),
        (
            lambda x: (x, x.detach().to_sparse()),
            "layer 1 (<lambda>), the last of stage 0: a sparse_coo tensor cannot be sent to the next stage: return a "
            "dense tensor",
        ),
        (
            lambda x: (x, torch._nested_tensor_from_tensor_list([x[0].detach(), x[0, :2].detach()])),
            "layer 1 (<lambda>), the last of stage 0: a nested tensor cannot pass between stages: return a "
            "dense tensor",
        ),
        (
            lambda x: (x, torch.empty(3, device="meta")),
            "layer 1 (<lambda>), the last of stage 0: a meta tensor cannot pass between stages: return a dense tensor",
        ),
        (7, "layer 1 is neither a module, a LayerSpec nor a function, but 7"),
        (nn.ReLU, "layer 1 is the class ReLU: give ReLU(...) or LayerSpec(ReLU, ...)"),
        (LayerSpec(broken), "layer 1 (broken) cannot be built: no such thing"),
        (
            nn.LazyLinear(4),
            "layer 1 (LazyLinear) has no shapes yet: call the module once before you give it to the pipeline, or use a "
            "class that takes all sizes",
        ),
        (ON_META, f"layer 1 (Linear) failed: {error_of_move(ON_META)}"),
        (
            LayerSpec(nn.LazyLinear, 4),
            "layer 1 (LazyLinear) has no shapes yet: call the module once before you give it to the pipeline, or use a "
            "class that takes all sizes",
        ),
    ],
)
def test_layers_that_cannot_be_used_are_named(layer, message):
    assert_message([*linears(1), layer, *linears(2)], message)


def test_a_rank_whose_layers_have_another_type():
    assert_message(
        [*linears(2), nn.Linear(4, 4).double(), nn.Linear(4, 4)],
        "layer 2 (Linear) failed: RuntimeError: mat1 and mat2 must have the same dtype, but got Float and Double",
    )


class SometimesTrained(nn.Module):
    """Returns a second tensor that requires a gradient for inputs above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        output = self.inner(x)
        return output, output * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("checkpoint", "tensor"),
    [
        (False, "tensor 1 that stage 0 sends"),
        (True, "recomputation of stage 0 failed: ValueError: tensor 1 that a checkpointed layer returns"),
    ],
)
def test_an_output_that_requires_a_gradient_in_some_microbatches_is_refused(checkpoint, tensor):
    assert_message(
        [SometimesTrained(), lambda pair: pair[0] + pair[1]],
        f"microbatch 2: {tensor} requires a gradient, but did not in the first microbatch: compute it from parameters "
        "in every microbatch or in none",
        batch=(torch.cat([-X[:4], X[4:]]), Y),
        checkpoint=checkpoint,
    )


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def two_with_one_weight() -> list:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return [first, last]


def function_of_a_weight() -> list:
    weight = nn.Parameter(torch.ones(4, 4))
    return [nn.Linear(4, 4), lambda x: x @ weight]


@pytest.mark.parametrize(
    ("make_ends", "message"),
    [
        (
            two_with_one_weight,
            "layers 0 and 3 share a parameter (weight in layer 3), but are on stages 0 and 1: make both of "
            "TiedLayerSpec with one key",
        ),
        (
            lambda: [LayerSpec(Around, nn.Linear(4, 4))] * 2,
            "layers 0 and 3 share a parameter (inner.weight in layer 3), but are on stages 0 and 1: make both of "
            "TiedLayerSpec with one key",
        ),
        (
            lambda: [nn.BatchNorm1d(4, affine=False)] * 2,
            "layers 0 and 3 share a buffer (running_mean in layer 3), but are on stages 0 and 1: give each layer a "
            "copy, or register a constant buffer with persistent=False",
        ),
        (
            function_of_a_weight,
            "layer 3 (<lambda>) uses a parameter of no layer of stage 1: make it a module that has the parameter, or a "
            "TiedLayerSpec with forward=...",
        ),
        (
            lambda: [TiedLayerSpec("norm", nn.BatchNorm1d, 4)] * 2,
            "TiedLayerSpec('norm'): layer 0 has buffers, which cannot be tied over stages",
        ),
        (
            lambda: [TiedLayerSpec("table", nn.Embedding, 4, 4, max_norm=1.0)] * 2,
            "TiedLayerSpec('table'): layer 0 has max_norm=1.0, which cannot be tied over stages",
        ),
        (
            lambda: [TiedLayerSpec("table", nn.Embedding, 4, 4, sparse=True)] * 2,
            "TiedLayerSpec('table'): layer 0 has sparse=True, which cannot be tied over stages",
        ),
        (
            lambda: [TiedLayerSpec("ends", nn.Linear, 4, 4), TiedLayerSpec("ends", nn.Linear, 4, 4, bias=False)],
            "TiedLayerSpec('ends') is Linear(4x4, 4) in layer 0 and Linear(4x4) in layer 3: layers with one key need "
            "one class and the same arguments; use forward=... where a layer computes something else",
        ),
    ],
    ids=[
        "weight",
        "module of two specs",
        "buffer",
        "function",
        "tied buffers",
        "tied max_norm",
        "tied sparse",
        "unequal ties",
    ],
)
def test_state_that_two_stages_would_change_separately_is_refused(make_ends, message):
    first, last = make_ends()
    assert_message([first, nn.ReLU(), nn.ReLU(), last], message)


def test_weights_that_forwards_change_are_refused_where_steps_are_validated_later():
    message = (
        "post_validation=True: layer 1 (Embedding) has max_norm=1.0, with which a forward changes "
        "weights, but post-validation repeats forwards: leave one out"
    )
    assert_message([nn.ReLU(), nn.Embedding(4, 4, max_norm=1.0), *linears(2)], message, post_validation=True)


def test_a_class_whose_forward_returns_a_tuple_cannot_be_split():
    assert_message(
        [*linears(2), nn.LSTM(4, 4), lambda pair: pair[0]],
        "layer 2 (LSTM) failed: ValueError: split_layers=LSTM cannot be split: its forward returns a tuple, not one "
        "tensor; leave it out of split_layers",
        split_layers=[nn.LSTM],
    )


def test_a_checkpointed_layer_is_refused_with_copies_to_the_host():
    message = "offload and checkpoint=True of layer 3: nothing that is recomputed is copied, so leave one out"
    layers = [*linears(3), LayerSpec(nn.Linear, 4, 4, checkpoint=True)]
    assert_message(layers, message, schedule="auto", memory_limit=2, offload=1.0)
