"""W hands its gradient to megatron-core's own DistributedDataParallel, as autograd would have."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.utils import get_model_config
from split_layers import MICROBATCHES, Layers, make_config, microbatches, one_rank

from megatron.zero_bubble.mcore.buckets import start_missing_reductions
from megatron.zero_bubble.mcore.forward_backward import GradSync
from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.step_call import refuse_unsupported
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

LAST = MICROBATCHES - 1


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


def wrap(model: Layers, *, is_split: bool, overlap: bool = False) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=400, delay_wgrad_compute=is_split
    )
    return DistributedDataParallel(model.config, config, model)


class Trained:
    """A model in DDP, whose operations can be run in any order; `events` says when which bucket is reduced."""

    def __init__(self, dtype: torch.dtype, *, is_split: bool, overlap: bool = False, num_uses: int = 1) -> None:
        self.store, self.events, model = WeightGradStore(), [], Layers(dtype, num_uses=num_uses)
        if is_split:
            split_weight_gradients([model], self.store)
        self.ddp = wrap(model, is_split=is_split, overlap=overlap)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.dtype = dtype
        for group in self.ddp.bucket_groups:
            group.start_grad_sync = self._recording(group, group.start_grad_sync)

    def _recording(self, group: object, start: Callable[..., None]) -> Callable[..., None]:
        def recording(*args: object, **kwargs: object) -> None:
            self.events += sorted(self.names[parameter] for parameter in group.params)
            start(*args, **kwargs)

        return recording

    def step(self, *operations: str) -> dict[str, torch.Tensor]:
        """Run these operations as one step and return the gradients at its end."""
        self.events.clear()
        self.ddp.zero_grad_buffer()
        data, grad_sync = microbatches(self.dtype), GradSync(self.ddp.no_sync)
        for operation in operations:
            kind, microbatch = operation[:-1], int(operation[-1])
            self.events.append(operation)
            grad_sync.enable(0, microbatch == LAST)
            if kind == "W":
                self.store.pop(0, microbatch)
                continue
            if kind == "WT":  # this and all later ones, as the executor does it
                self.store.pop_by_parameter(
                    0, range(microbatch, MICROBATCHES), lambda m: self._before_share(grad_sync, m)
                )
                continue
            x, gradient = data[microbatch]
            output = self.ddp(x)
            if kind == "BW":
                output.backward(gradient)
                continue
            with self.store.deferring():
                output.backward(gradient)
            self.store.flush(0, microbatch)
        grad_sync.enable_all()
        self.events.append("end")
        self.ddp.finish_grad_sync()
        assert all(parameter.grad is None for parameter in self.names), "everything is in main_grad"
        return {name: parameter.main_grad.clone() for parameter, name in self.names.items()}

    def _before_share(self, grad_sync: GradSync, microbatch: int) -> None:
        self.events.append(f"share of W{microbatch}")
        grad_sync.enable(0, microbatch == LAST)


FUSED = ("BW0", "BW1", "BW2")
ORDERS = [
    ("B0", "W0", "B1", "W1", "B2", "W2"),
    ("B0", "B1", "W0", "B2", "W1", "W2"),
    ("B0", "B1", "B2", "W0", "W1", "W2"),
]
IN_TAIL = [("B0", "B1", "B2", "WT0"), ("B0", "W0", "B1", "B2", "WT1")]


@pytest.mark.parametrize("order", [*ORDERS, *IN_TAIL, FUSED, ("BW0", "B1", "B2", "W1", "W2")], ids=" ".join)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("num_uses", [1, 2], ids=["", "layers used twice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_that_of_autograd_in_every_order(dtype, num_uses, overlap, order):
    ours = Trained(dtype, is_split=True, overlap=overlap, num_uses=num_uses)
    reference = Trained(dtype, is_split=False, num_uses=num_uses)
    for _ in range(3):  # with overlap, DDP waits for the end of the first step to learn the buckets
        expected = reference.step(*FUSED)
        for name, gradient in ours.step(*order).items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_a_bucket_is_reduced_as_soon_as_its_last_gradient_is_there(order):
    """Its reduction starts at the W of the last microbatch, not at that microbatch's B or at an earlier one's W."""
    trained = Trained(torch.float32, is_split=True, overlap=True)
    assert len(trained.ddp.bucket_groups) > 1
    trained.step(*order)
    trained.step(*order)
    events = trained.events
    for name in trained.names.values():
        assert events.count(name) == 1
        assert events.index(f"W{LAST}") < events.index(name) < events.index("end"), f"{name}: {events}"


@pytest.mark.parametrize("order", IN_TAIL, ids=" ".join)
def test_in_the_tail_a_bucket_is_reduced_before_the_next_parameters_first_w(order):
    trained = Trained(torch.float32, is_split=True, overlap=True)
    trained.step(*order)
    trained.step(*order)
    tail = trained.events[len(order) :]
    shares = [f"share of W{m}" for m in range(int(order[-1][-1]), MICROBATCHES)]
    # The row-parallel layer is the later one of the two.
    assert tail == [*shares, "row.bias", "row.weight", *shares, "column.bias", "column.weight", "end"]


@pytest.mark.parametrize("without", [(True, True, True), (False, True, False)], ids=["never", "sometimes"])
def test_a_bucket_with_a_parameter_that_gets_no_gradient_is_reduced_at_the_end(without):
    """megatron-core's schedules reduce all buckets at the end, except on the first stage."""
    trained = Trained(torch.float32, is_split=True, overlap=True)
    finish = trained.ddp.finish_grad_sync
    trained.ddp.finish_grad_sync = lambda: (start_missing_reductions([trained.ddp], False), finish())
    for is_idle in without:
        trained.ddp.module.column.bias.requires_grad_(not is_idle)
        gradients = trained.step(*ORDERS[1])
        assert gradients["column.bias"].any() != is_idle
        assert sorted(event for event in trained.events if "." in event) == sorted(trained.names.values())


def test_grad_sync_follows_each_operation_by_itself():
    trained = Trained(torch.float32, is_split=True, overlap=True)
    [group, *_] = trained.ddp.bucket_groups
    grad_sync, seen = GradSync(trained.ddp.no_sync), []
    for enabled in (False, False, True, True, False, True, False):
        grad_sync.enable(0, enabled)
        seen.append(group.is_last_microbatch)
    grad_sync.enable_all()
    assert seen == [False, False, True, True, False, True, False]
    assert group.is_last_microbatch, "as DDP expects it between steps"


def test_grad_sync_has_a_switch_for_each_chunk():
    chunks = [Trained(torch.float32, is_split=True, overlap=True) for _ in range(2)]
    grad_sync = GradSync([chunk.ddp.no_sync for chunk in chunks])

    def switches() -> list[bool]:
        return [chunk.ddp.bucket_groups[0].is_last_microbatch for chunk in chunks]

    grad_sync.enable(0, False)
    assert switches() == [False, True]
    grad_sync.enable(1, False)
    assert switches() == [False, False]
    grad_sync.enable(1, True)
    assert switches() == [False, True]
    grad_sync.enable_all()
    assert switches() == [True, True]


def test_grad_sync_has_one_switch_if_the_chunks_share_a_function():
    trained = Trained(torch.float32, is_split=True, overlap=True)
    [group, *_] = trained.ddp.bucket_groups
    grad_sync, seen = GradSync(trained.ddp.no_sync), []
    for chunk, enabled in ((0, False), (1, False), (0, True), (1, False), (1, True)):
        grad_sync.enable(chunk, enabled)
        seen.append(group.is_last_microbatch)
    assert seen == [False, False, True, False, True]


def test_without_no_sync_there_is_nothing_to_switch():
    grad_sync = GradSync(None)
    grad_sync.enable(0, False)
    grad_sync.enable(0, True)
    grad_sync.enable_all()


def test_a_model_that_is_wrapped_already_is_refused():
    ddp = wrap(Layers(torch.float32), is_split=True)
    with pytest.raises(ValueError, match="before the model is wrapped in DistributedDataParallel"):
        split_weight_gradients([ddp], WeightGradStore())


def test_ddp_that_would_lose_what_w_brings_is_refused():
    """Without `delay_wgrad_compute` DDP reduces gradients in B, so that it would miss a W that runs later."""
    model = Layers(torch.float32)
    split_weight_gradients([model], WeightGradStore())
    config = get_model_config(model)
    refuse_unsupported(config, [wrap(model, is_split=True)], None)
    with pytest.raises(ValueError, match="wrap the model with delay_wgrad_compute=True"):
        refuse_unsupported(config, [wrap(model, is_split=False)], None)
    refuse_unsupported(config, [wrap(Layers(torch.float32), is_split=False)], None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_comm_overlap": True}, "tp_comm_overlap is not supported by zero-bubble schedules"),
        ({"fp8": "hybrid"}, None),
        # Fields of later versions of megatron-core.
        ({"fine_grained_activation_offloading": True}, "fine_grained_activation_offloading is not .*: W may need a"),
        ({"moe_paged_stash": True}, "moe_paged_stash is not supported .* own order of operations; switch it off"),
        ({"overlap_dispatch_backward_with_experts_wgrad": True}, "megatron-core then runs the W of experts itself"),
        ({"moe_paged_stash": False}, None),
        ({"use_transformer_engine_op_fuser": True}, "compute W outside of the layers that defer W; switch it off"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant 'dsa' is not supported"),
        ({"experimental_attention_variant": "gdn"}, None),
        ({"gtp_weight_remat_size": 2, "tensor_model_parallel_size": 4}, "gtp_weight_remat_size 2 .* shards weights"),
        ({"tensor_parallel_num_weight_shards": 4, "tensor_model_parallel_size": 4}, None),
        ({"tensor_parallel_num_weight_shards": 4}, "it works with as many shards as tensor ranks"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "core hangs with biases; leave mlp"),
        ({"recompute_modules": ["mlp"]}, None),
        ({"cuda_graph_impl": "none"}, None),
        ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl 'full_iteration' is not supported"),
        ({"num_microbatches_with_partial_activation_checkpoints": 0}, "by their place in megatron-core's own"),
        # This project sets it, for Transformer Engine.
        ({"delay_wgrad_compute": True}, None),
    ],
)
def test_settings_with_which_w_cannot_be_deferred_are_refused(settings, message):
    config = copy.copy(make_config())
    vars(config).update(settings)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        refuse_unsupported(config, [], None)
