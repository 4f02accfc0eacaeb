"""B and W of split layers add up to autograd's backward, bit for bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from split_runs import MICROBATCHES, assert_same, gradients, run
from torch import nn

from megatron.zero_bubble.pipeline.weight_split import split_modules
from megatron.zero_bubble.runtime.copy_lane import ThreadLink
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

LAYERS = {
    "linear": (nn.Linear(6, 4), (5, 6)),
    "linear of sequences": (nn.Linear(6, 4), (2, 5, 6)),
    "linear without bias": (nn.Linear(6, 4, bias=False), (5, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1, dilation=2), (2, 3, 8, 8)),
    "conv2d with circular padding": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 8, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "transposed conv1d": (nn.ConvTranspose1d(4, 3, 3, stride=2), (2, 4, 5)),
    "transposed conv2d": (nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), (2, 4, 5, 5)),
    "transposed conv3d": (nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3)),
}


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_b_and_w_are_autograd_s_backward(name, packs):
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for _ in range(MICROBATCHES)]
    reference, ours, fused = (copy.deepcopy(layer) for _ in range(3))
    expected = run(reference, inputs)
    store = WeightGradStore()
    assert set(split_modules([ours], store)) == set(ours.parameters())
    assert torch.equal(ours(inputs[0]), layer(inputs[0]))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if packs else nullcontext():
        found = run(ours, inputs, store)
    assert all(map(torch.equal, found, expected))
    assert not any(grad is not None for grad in gradients(ours).values()), "W has run in B"
    for k in range(MICROBATCHES):
        store.pop(0, k)
    assert_same(ours, reference)
    split_modules([fused], WeightGradStore())
    assert all(map(torch.equal, run(fused, inputs), expected))
    assert_same(fused, reference)


def test_a_user_s_hooks_on_saved_tensors_may_be_methods_of_tensors():
    layer, store = nn.Linear(6, 4), WeightGradStore()
    split_modules([layer], store)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.double, torch.Tensor.float):
        run(layer, [torch.randn(5, 6)], store)
    assert store.pending()


def test_inputs_leave_the_device_with_the_other_activations():
    """An input is a leaf of its layer's graph otherwise, and leaves stay."""
    layers, splits = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), WeightGradStore()
    split_modules([layers], splits)
    store, x = OffloadStore(ThreadLink()), torch.randn(64, 64).requires_grad_()
    with store.forward(0, 0, [x]):
        loss = layers(x * 1).square().sum()
    before = store.device_bytes(0, 0)
    store.wait(0, 0)
    store.release(0, 0)
    assert (before > 0, store.device_bytes(0, 0)) == (True, 0)
    store.bring_back(0, 0)
    store.wait(0, 0)
    with splits.deferring():
        loss.backward()
    splits.flush(0, 0)
    splits.pop(0, 0)
    reference = copy.deepcopy(layers)
    split_modules([reference], WeightGradStore())
    reference.zero_grad()
    run(reference, [x])
    assert_same(layers, reference)


def test_an_embedding_has_no_b():
    layer = nn.Embedding(10, 4, padding_idx=2)
    reference, store = copy.deepcopy(layer), WeightGradStore()
    inputs = [torch.randint(10, (2, 5)) for _ in range(2)]
    run(reference, inputs)
    split_modules([layer], store)
    run(layer, inputs, store)
    assert layer.weight.grad is None
    store.pop(0, 0), store.pop(0, 1)
    assert_same(layer, reference)


class Twice(nn.Module):
    """Uses one layer twice, and changes its output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.inner(self.norm(self.inner(x).relu_()))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_that_is_used_twice_adds_its_gradients_as_one_backward_does(autocast):
    torch.manual_seed(0)
    reference, store = Twice(), WeightGradStore()
    ours = copy.deepcopy(reference)
    inputs = [torch.randn(5, 4) for _ in range(MICROBATCHES)]
    split = split_modules([ours], store)
    assert {name for name, own in ours.named_parameters() if any(own is other for other in split)} == {
        "inner.weight",
        "inner.bias",
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        for module, of_module in ((reference, None), (ours, store)):
            outputs = [module(x) for x in inputs]
            with torch.autocast("cpu", enabled=False):
                for k, output in enumerate(outputs):
                    if of_module is None:
                        output.float().sum().backward()
                    else:
                        with store.deferring():
                            output.float().sum().backward()
                        store.flush(0, k)
    for k in range(MICROBATCHES):
        store.pop(0, k)
    assert_same(ours, reference)


def test_a_module_may_defer_its_weight_gradients_by_itself():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.inside = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

        def defer_weight_gradients(self, store):
            self.store = store
            return [self.weight]

    scale, store = Scale(), WeightGradStore()
    assert split_modules([nn.Sequential(scale)], store) == [scale.weight]
    assert scale.store is store
    assert "forward" not in vars(scale.inside)


class Attention(nn.Module):
    """Attention between three inputs that are computed from one, with a mask and dropout."""

    def __init__(self, num_inputs: int, need_weights: bool, **kwargs) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(num_inputs))
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2, dropout=0.3, **kwargs), need_weights

    def forward(self, x):
        inputs = [norm(x) for norm in self.norms]
        query, key, value = inputs[0], inputs[min(1, len(inputs) - 1)], inputs[-1]
        if not self.attention._qkv_same_embed_dim:
            key, value = key[..., : self.attention.kdim], value[..., : self.attention.vdim]
        mask = torch.ones(len(x), len(x)).triu(1).bool()
        return self.attention(query, key, value, need_weights=self.need_weights, attn_mask=mask)[0]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    ("num_inputs", "kwargs"),
    [
        (1, {}),
        (1, {"bias": False, "batch_first": True}),
        (1, {"add_bias_kv": True}),
        (2, {}),
        (2, {"bias": False}),
        (3, {}),
        (3, {"kdim": 4, "vdim": 6, "add_zero_attn": True}),
    ],
)
def test_both_projections_of_torch_s_attention_are_split(num_inputs, kwargs, need_weights):
    torch.manual_seed(0)
    reference, store = Attention(num_inputs, need_weights, **kwargs), WeightGradStore()
    ours, fused = copy.deepcopy(reference), copy.deepcopy(reference)
    inputs = [torch.randn(5, 5, 8) for _ in range(MICROBATCHES)]
    names = {id(own): name for name, own in ours.named_parameters()}
    split = {names[id(own)] for own in split_modules([ours], store)}
    assert {name for name in names.values() if "proj" in name} == split

    def run_seeded(module, of_module=None):
        torch.manual_seed(1)
        return run(module, inputs, of_module)

    expected = run_seeded(reference)
    assert all(map(torch.equal, run_seeded(ours, store), expected))
    assert not any(gradients(ours)[name] is not None for name in split), "W has run in B"
    for k in range(MICROBATCHES):
        store.pop(0, k)
    assert_same(ours, reference)
    split_modules([fused], WeightGradStore())
    assert all(map(torch.equal, run_seeded(fused), expected))
    assert_same(fused, reference)


def test_what_cannot_be_split_is_left_to_autograd():
    class OwnForward(nn.Linear):
        def forward(self, x):
            return super().forward(x).exp()

    class OnlyAName(nn.Linear):
        pass

    class Sharded(nn.Linear):
        def reshard(self):
            """As in the class that `fully_shard` gives to a module."""

    tied = nn.ModuleList([nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)])
    tied[1].weight = tied[0].weight
    computed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    frozen = nn.Linear(3, 3).requires_grad_(False)
    normed = nn.MultiheadAttention(4, 2)
    torch.nn.utils.parametrizations.weight_norm(normed, "in_proj_weight")
    modules = [OwnForward(3, 3), Sharded(3, 3), tied, computed, frozen, nn.BatchNorm1d(3), normed]
    assert split_modules(modules, WeightGradStore()) == []
    assert frozen(torch.ones(1, 3)).requires_grad is False
    assert len(split_modules([OnlyAName(3, 3)], WeightGradStore())) == 2
    assert len(split_modules([OwnForward(3, 3)], WeightGradStore(), [OwnForward])) == 2
