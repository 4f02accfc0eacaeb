"""B and W of megatron-core's linear layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from split_layers import (
    BATCH,
    HIDDEN,
    MICROBATCHES,
    OUTPUT,
    SEQUENCE,
    Layers,
    assert_equal,
    make_config,
    microbatches,
    one_rank,
    run_fused,
    run_split,
)

from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.weight_grad import SplitWeight
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


BIASES = [
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"bias": True, "skip_bias_add": True}, id="skip_bias_add"),
    pytest.param({"bias": False}, id="no bias"),
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_b_then_w_is_the_fused_backward(dtype, bias):
    store, model = WeightGradStore(), Layers(dtype, **bias)
    assert split_weight_gradients([model], store) == ["column.weight", "row.weight"]
    assert_equal(run_split(model, store, dtype), run_fused(Layers(dtype, **bias), dtype))


def test_a_compiled_model_defers_w(monkeypatch):
    """Code compiled while no backward defers W must not become a backward that never defers W."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    store, model = WeightGradStore(), Layers()
    split_weight_gradients([model], store)
    model.compile(backend="eager")
    fused = run_fused(Layers())
    assert_equal(run_fused(model), fused)
    model.zero_grad()
    assert_equal(run_split(model, store), fused)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outside_of_deferring_a_split_layer_runs_the_fused_backward(dtype):
    store, model = WeightGradStore(), Layers(dtype)
    split_weight_gradients([model], store)
    assert_equal(run_fused(model, dtype), run_fused(Layers(dtype), dtype))
    assert store.pending() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_that_is_used_twice_has_one_gradient_a_microbatch(dtype):
    """A layer is used twice where multi-token prediction shares the output layer."""
    store, model = WeightGradStore(), Layers(dtype, num_uses=2)
    split_weight_gradients([model], store)
    expected = run_fused(Layers(dtype, num_uses=2), dtype)
    assert_equal(run_split(model, store, dtype), expected)
    model.zero_grad()
    assert_equal(run_fused(model, dtype), expected)


def test_b_leaves_the_weights_gradient_to_w_and_nothing_else():
    store, model = WeightGradStore(), Layers()
    split_weight_gradients([model], store)
    [(x, gradient), *_] = microbatches()
    with store.deferring():
        model(x).backward(gradient)
    store.flush(0, 0)
    assert (model.column.weight.grad, model.row.weight.grad) == (None, None)
    assert all(value is not None for value in (x.grad, model.column.bias.grad, model.row.bias.grad))
    store.pop(0, 0)
    assert not model.column.weight.grad.requires_grad, "autograd does not record W"


def test_a_pending_w_holds_its_layers_input_and_not_the_graph_behind_it():
    alive: list[weakref.ref] = []

    class LayerBefore(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = torch.ones(1)
            alive.append(weakref.ref(ctx.kept))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    store, model = WeightGradStore(), Layers()
    split_weight_gradients([model], store)
    [(x, gradient), *_] = microbatches()
    with store.deferring():
        model.row(model.column(LayerBefore.apply(x))[0])[0].backward(gradient)
    store.flush(0, 0)
    assert [reference() for reference in alive] == [None]


class ReturnsItsInput(torch.autograd.Function):
    """A function whose gradient is a tensor of its forward, as that of megatron-core's loss is in fp32."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0]


def test_neither_w_nor_its_result_keeps_a_graph_or_a_gradient():
    store, model = WeightGradStore(), Layers()
    split_weight_gradients([model], store)
    [(x, _), *_] = microbatches()
    with store.deferring():
        ReturnsItsInput.apply(model(x)).backward()
    store.flush(0, 0)
    store.pop(0, 0)
    gradient, model.row.weight.grad = model.row.weight.grad, None
    assert not gradient.requires_grad
    reference = weakref.ref(gradient)
    del gradient
    assert reference() is None


def test_a_model_is_freed_after_its_last_use():
    """The hook of megatron-core's DDP refers to the whole model, its optimizer's buffers and its process groups."""
    model = Layers()
    split_weight_gradients([model], WeightGradStore())
    model.column.register_wgrad_accumulation_and_reduce_hooks(model.forward)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class Gathering:
    """A gather in the background: what it gathers is NaN until it has been waited for."""

    def __init__(self, calls: list[str], whole: torch.Tensor, kept: torch.Tensor) -> None:
        self.calls, self.whole, self.kept = calls, whole.fill_(float("nan")), kept.clone()

    def wait(self) -> None:
        self.calls.append("wait")
        self.whole.copy_(self.kept)


def test_with_sequence_parallelism_the_next_layers_input_is_gathered_while_this_one_multiplies(monkeypatch):
    """The gather among tensor-parallel ranks is faked in one process: it gives back what this rank kept."""
    calls: list[str] = []

    def gather(whole, kept, group, async_op):
        assert async_op
        calls.append("gather")
        return Gathering(calls, whole, kept)

    def multiply(self, grad, *into):
        calls.append("multiplied")
        accumulate(self, grad, *into)

    accumulate = SplitWeight.accumulate
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(SplitWeight, "accumulate", multiply)
    layers, store = [Layers(), Layers()], WeightGradStore()
    model = torch.nn.Sequential(*layers)
    split_weight_gradients([model], store)
    for layer in layers:
        layer.column.sequence_parallel, layer.column.allreduce_dgrad = True, False
    assert_equal(run_split(model, store), run_fused(torch.nn.Sequential(Layers(), Layers())))
    # The row-parallel layer of each pair multiplies first, and its input needs no gather.
    assert calls == ["gather", "multiplied", "wait", "multiplied"] * 2 * MICROBATCHES


class Reducing:
    """A sum over ranks in the background: it is NaN until it has been waited for."""

    def __init__(self, total: torch.Tensor, parts: torch.Tensor) -> None:
        self.total, self.parts = total, parts.clone()
        total.fill_(float("nan"))

    def wait(self) -> None:
        self.total.copy_(self.parts)


def test_with_tensor_parallelism_the_gradient_of_the_input_is_waited_for(monkeypatch):
    """The reduction among tensor-parallel ranks is faked in one process: it gives back what this rank has."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, async_op: Reducing(tensor, tensor))
    model, store = Layers(), WeightGradStore()
    split_weight_gradients([model], store)
    model.column.allreduce_dgrad = True
    assert_equal(run_split(model, store), run_fused(Layers()))


def test_only_the_instances_of_the_model_change():
    classes = (ColumnParallelLinear, RowParallelLinear)
    before = [dict(cls.__dict__) for cls in classes]
    model, bystander = Layers(), Layers()
    split_weight_gradients([model], WeightGradStore())
    assert [dict(cls.__dict__) for cls in classes] == before
    assert "_forward_impl" in vars(model.column)
    assert "_forward_impl" not in vars(bystander.column)
    assert set(model.state_dict()) == set(bystander.state_dict()), "checkpoints are the same"


def test_a_frozen_weight_is_not_split():
    store, model, reference = WeightGradStore(), Layers(), Layers()
    for layers in (model, reference):
        layers.column.weight.requires_grad_(False)
    assert split_weight_gradients([model], store) == ["row.weight"]
    ours = run_split(model, store)
    assert ours["column.weight"] is None
    assert_equal(ours, run_fused(reference))


def test_a_layer_whose_output_has_another_type_is_not_split():
    """megatron-core 0.20 gives the output layer such a type with `--output-logit-dtype`."""
    model = Layers()
    model.column.output_dtype = torch.float64
    assert split_weight_gradients([model], WeightGradStore()) == ["row.weight"]


def test_a_weight_that_is_frozen_after_the_split_gets_no_gradient():
    store, model, reference = WeightGradStore(), Layers(), Layers()
    split_weight_gradients([model], store)
    for layers in (model, reference):
        layers.row.weight.requires_grad_(False)
    assert_equal(run_split(model, store), run_fused(reference))


def test_an_output_layer_that_uses_the_embeddings_weight_is_not_split():
    options = {"config": make_config(), "init_method": torch.nn.init.normal_, "bias": False}
    layer = ColumnParallelLinear(HIDDEN, OUTPUT, skip_weight_param_allocation=True, **options)
    store = WeightGradStore()
    assert split_weight_gradients([layer], store) == []
    embedding = torch.randn(OUTPUT, HIDDEN, requires_grad=True)
    with store.deferring():
        layer(torch.randn(SEQUENCE, BATCH, HIDDEN), weight=embedding)[0].sum().backward()
    assert embedding.grad is not None


def test_a_second_deferral_by_megatron_core_is_refused():
    model = Layers()
    model.config.defer_embedding_wgrad_compute = True
    with pytest.raises(ValueError, match=r"^defer_embedding_wgrad_compute .*: switch it off$"):
        split_weight_gradients([model], WeightGradStore())
