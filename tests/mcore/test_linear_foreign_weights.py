"""Weights that users change, replace, share or hook: each gradient is the gradient of megatron-core's own layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear
from split_layers import HIDDEN, OUTPUT, Layers, assert_equal, microbatches, one_rank, run_fused, run_split

from megatron.zero_bubble.mcore.linear import count_gradients, split_weight_gradients
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


class Scaled(Layers):
    """The column-parallel layer computes with its weight times a trained factor, as quantization and pruning do."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.factor = torch.nn.Parameter(torch.full((OUTPUT, 1), 1.25, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(torch.tanh(self.column(torch.tanh(x), weight=self.column.weight * self.factor)[0]))[0]


class OfAnotherWeight(Layers):
    """The column-parallel layer computes with a parameter that belongs to the model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        generator = torch.Generator().manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(OUTPUT, HIDDEN, generator=generator).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.row(torch.tanh(self.column(torch.tanh(x), weight=self.table)[0]))[0]
        return self.row(torch.tanh(self.column(x)[0]))[0]


class Shared(Layers):
    """Two column-parallel layers have one weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.second = ColumnParallelLinear(
            HIDDEN, OUTPUT, config=self.config, init_method=torch.nn.init.xavier_normal_, bias=False
        )
        self.second.weight = self.column.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.row(torch.tanh(self.column(torch.tanh(x))[0]))[0]
        return self.row(torch.tanh(self.second(x)[0]))[0]


class UsedElsewhere(Layers):
    """Another operation uses the weight of the column-parallel layer, as a penalty on its size does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.column.weight.square().mean() * x.mean()


class Derived(Layers):
    """A hook of the backward differentiates a forward of its own, as implicit layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        with torch.enable_grad():
            point = output.detach().requires_grad_()
            again = super().forward(point)

        def through_point(gradient: torch.Tensor) -> torch.Tensor:
            return gradient + torch.autograd.grad(again, point, gradient, retain_graph=True)[0]

        if output.requires_grad:
            output.register_hook(through_point)
        return output


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint that asks for the gradients of the parameters, too."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        return None, *torch.autograd.grad(output, (x, *ctx.parameters), gradient)


class OwnCheckpointed(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnCheckpoint.apply(super().forward, x, *self.parameters())


class Adapted(Layers):
    """The column-parallel layer is called with a sum of its weight and a trained matrix in the place of the weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.adapter = torch.nn.Parameter(torch.full_like(self.column.weight, 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = {"weight": self.column.weight + self.adapter}
        column, bias = torch.func.functional_call(self.column, adapted, (torch.tanh(x),))
        return self.row(torch.tanh(column if bias is None else column + bias))[0]


def with_spectral_norm(dtype: torch.dtype = torch.float32) -> Layers:
    torch.manual_seed(4)
    layers = Layers(dtype)
    torch.nn.utils.parametrizations.spectral_norm(layers.column, "weight")
    return layers


def with_mask(dtype: torch.dtype = torch.float32) -> Layers:
    layers = Layers(dtype)
    mask = torch.arange(HIDDEN) % 2
    layers.column.weight.register_hook(lambda gradient: gradient * mask)
    return layers


MODELS = [Scaled, OfAnotherWeight, Shared, Derived, OwnCheckpointed, Adapted, with_spectral_norm, with_mask]


def in_ddp(
    make: Callable[[torch.dtype], Layers], dtype: torch.dtype, *, overlap: bool, is_split: bool
) -> dict[str, torch.Tensor]:
    """The gradients that DDP has accumulated over all microbatches."""
    store, model = WeightGradStore(), make(dtype)
    if is_split:
        split_weight_gradients([model], store)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=400, delay_wgrad_compute=is_split
    )
    ddp = DistributedDataParallel(model.config, config, model)
    data = microbatches(dtype)
    for m, (x, gradient) in enumerate(data[:-1]):
        with ddp.no_sync():
            run_b(ddp, store, m, x, gradient) if is_split else ddp(x).backward(gradient)
    last = len(data) - 1
    if is_split:
        with ddp.no_sync():
            for m in range(last):
                store.pop(0, m)
        run_b(ddp, store, last, *data[last])
        store.pop(0, last)
    else:
        ddp(data[last][0]).backward(data[last][1])
    ddp.finish_grad_sync()
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def run_b(
    model: torch.nn.Module, store: WeightGradStore, microbatch: int, x: torch.Tensor, gradient: torch.Tensor
) -> None:
    output = model(x)
    with store.deferring():
        output.backward(gradient)
    store.flush(0, microbatch)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [*MODELS, UsedElsewhere])
def test_ddp_gets_the_gradients_of_the_fused_backward(make, dtype, overlap):
    assert_equal(
        in_ddp(make, dtype, overlap=overlap, is_split=True), in_ddp(make, dtype, overlap=overlap, is_split=False)
    )


@pytest.mark.parametrize("make", MODELS)
def test_the_gradients_are_equal_without_ddp(make):
    store, model = WeightGradStore(), make()
    split_weight_gradients([model], store)
    assert_equal(run_split(model, store), run_fused(make()))


def test_a_hook_that_is_registered_after_ddp_runs_before_the_gradient_leaves():
    def halved(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    gradients = []
    for is_split in (False, True):
        store, model = WeightGradStore(), Layers()
        if is_split:
            split_weight_gradients([model], store)
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, delay_wgrad_compute=is_split)
        ddp = DistributedDataParallel(model.config, config, model)
        model.column.weight.register_post_accumulate_grad_hook(halved)
        for m, (x, gradient) in enumerate(microbatches()):
            if is_split:
                run_b(ddp, store, m, x, gradient)
                store.pop(0, m)
            else:
                ddp(x).backward(gradient)
        gradients.append({name: parameter.main_grad for name, parameter in model.named_parameters()})
    assert_equal(gradients[1], gradients[0])


def test_a_weight_that_is_computed_from_others_is_counted_as_unsplit():
    model = with_spectral_norm()
    assert split_weight_gradients([model], WeightGradStore()) == ["row.weight"]
    gradients = count_gradients([model])
    assert gradients.in_w == HIDDEN * OUTPUT
    assert gradients.missed == ()


def test_a_weight_with_a_hook_is_counted_as_unsplit():
    model = with_mask()
    split_weight_gradients([model], WeightGradStore())
    gradients = count_gradients([model])
    assert gradients.unsplit == (("column (ColumnParallelLinear)", HIDDEN * OUTPUT),)
    assert gradients.missed == ()


def test_a_layer_of_a_class_with_another_forward_is_not_split():
    class Doubling(ColumnParallelLinear):
        def _forward_impl(self, *args, **kwargs):
            return 2 * super()._forward_impl(*args, **kwargs)

    def make() -> Layers:
        layers = Layers()
        layers.column.__class__ = Doubling
        return layers

    store, model = WeightGradStore(), make()
    assert split_weight_gradients([model], store) == ["row.weight"]
    assert_equal(run_split(model, store), run_fused(make()))


def test_gradients_that_are_views_of_a_buffer_stay_views():
    def flat_gradients(*, is_split: bool) -> torch.Tensor:
        store, model = WeightGradStore(), Layers()
        if is_split:
            split_weight_gradients([model], store)
        flat, start = torch.zeros(sum(parameter.numel() for parameter in model.parameters())), 0
        for parameter in model.parameters():
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        run_split(model, store) if is_split else run_fused(model)
        return flat

    assert torch.equal(flat_gradients(is_split=True), flat_gradients(is_split=False))


def test_a_weight_that_is_replaced_after_the_split_is_freed():
    """FSDP2 replaces each weight by a shard."""
    model = Layers()
    split_weight_gradients([model], WeightGradStore())
    kept = [weakref.ref(layer.weight) for layer in (model.column, model.row)]
    for layer in (model.column, model.row):
        layer.weight = torch.nn.Parameter(layer.weight.detach()[:1].clone())
    gc.collect()
    assert [weight() for weight in kept] == [None, None]


def test_a_model_that_is_converted_and_wrapped_again_has_the_gradients_of_the_fused_backward():
    def gradients(*, is_split: bool) -> dict[str, torch.Tensor]:
        model = Layers()
        if is_split:
            split_weight_gradients([model], WeightGradStore())
        config = DistributedDataParallelConfig(delay_wgrad_compute=is_split)
        DistributedDataParallel(model.config, config, model)
        ddp = DistributedDataParallel(model.config, config, model.bfloat16())
        for x, gradient in microbatches(torch.bfloat16):
            ddp(x).backward(gradient)
        return {name: parameter.main_grad for name, parameter in model.named_parameters()}

    assert_equal(gradients(is_split=True), gradients(is_split=False))


def test_an_input_that_is_changed_before_w_is_refused():
    class Reusing(Layers):
        """A buffer is the column-parallel layer's input, and the next forward writes into it."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros_like(microbatches()[0][0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.kept.copy_(x)
            return self.row(torch.tanh(self.column(self.kept)[0]))[0] + x

    store, model = WeightGradStore(), Reusing()
    split_weight_gradients([model], store)
    (x, gradient), (other, _), _ = microbatches()
    run_b(model, store, 0, x, gradient)
    model(other)
    with pytest.raises(ForwardStepError, match=r"^column .* changed in place between B and W"):
        store.pop(0, 0)


def test_a_model_whose_output_layer_is_not_megatron_cores_is_split():
    model = Layers()
    model.output_layer = torch.nn.Linear(HIDDEN, HIDDEN)
    assert split_weight_gradients([model], WeightGradStore()) == ["column.weight", "row.weight"]
