"""Layers with activation recomputation: F drops a layer's activations, and R runs the layer again before B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.graph_backward import run_backward
from megatron.zero_bubble.pipeline.messages import MessageSpec, StageMessage, clone_tensors, versions_of
from megatron.zero_bubble.runtime.recomputation_store import ForwardMode, RecomputationStore

Layer = Callable[[Any], Any]


class DroppingLayer:
    """Runs a checkpointed layer; `RecomputationStore.mode` says whether an F drops or keeps the layer's activations."""

    def __init__(self, layer: Layer, store: RecomputationStore, device: torch.device) -> None:
        self._layer, self._store, self._device = layer, store, device

    def __call__(self, value: Any) -> Any:
        mode = self._store.mode
        if mode is None:
            return self._probe(value) if torch.is_grad_enabled() else self._layer(value)
        given = StageMessage.of(value)
        if mode is ForwardMode.KEEP:
            output = self._layer(value)
            self._store.keep(given.tensors, StageMessage.of(output).tensors)
            return output
        call = _DroppedCall(self._layer, given.spec, self._store, Autocast.current(self._device.type))
        # An extra input always needs a gradient: a layer whose other inputs need none would otherwise have no backward.
        wanted = torch.empty(0, requires_grad=True)
        outputs = _Dropped.apply(call, wanted, *given.tensors)
        assert call.returned is not None
        return call.returned.value_of(outputs)

    def _probe(self, value: Any) -> Any:
        """Run the layer outside of any F of the schedule, and find out whether the layer changes its input in place.

        If the layer changes its input in place, all later calls of the layer get a copy of the input. Without a copy of
        the input, F would overwrite the input from which R runs the layer again. R would fail without a copy of the
        input, because autograd refuses in-place changes of a leaf tensor that requires a gradient.
        """
        before = versions_of(value)
        output = self._layer(value)
        if before != versions_of(value):
            layer = self._layer
            self._layer = lambda value: layer(clone_tensors(value))
        return output


class _DroppedCall:
    """One call of a checkpointed layer, which is run twice: in F and in R."""

    def __init__(self, layer: Layer, given: MessageSpec, store: RecomputationStore, autocast: Autocast) -> None:
        self._layer, self._given, self._autocast = layer, given, autocast
        self.store = store
        self.during_backward: Callable[[], AbstractContextManager[None]] = nullcontext
        self.returned: MessageSpec | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._needs_gradient: Sequence[bool] = ()
        self._inputs: list[torch.Tensor] = []
        self._output: StageMessage | None = None

    def run(self, tensors: tuple[torch.Tensor, ...], needs_gradient: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Run F, and keep the inputs and the states of the random number generators."""
        self._tensors, self._needs_gradient = tensors, needs_gradient
        self._random_state, self._device_states = torch.get_rng_state(), get_device_states(*tensors)
        with torch.no_grad(), self._autocast.forward(keeps_casts=False):
            # Detached, because a view of an input that needs a gradient would need one, too, but has no graph.
            inputs = [tensor.detach() for tensor in tensors]
            output = StageMessage.of(self._layer(self._given.value_of(inputs)))
        self.returned = output.spec
        return output.tensors

    def recompute(self) -> None:
        """Run R: run the layer again from the kept inputs and random states, with gradients."""
        self._inputs = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(self._tensors, self._needs_gradient, strict=True)
        ]
        devices, states = self._device_states
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), self._autocast.forward():
            torch.set_rng_state(self._random_state)
            set_device_states(devices, states)
            self._output = StageMessage.of(self._layer(self._given.value_of(self._inputs)))
        self._output.release()
        self._tensors = ()

    def run_backward(self, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        assert self._output is not None, "backward of a layer before its R"
        run_backward(*self._output.backward_from(grads), accumulates=True)
        inputs, self._inputs, self._output = self._inputs, [], None
        return [tensor.grad for tensor in inputs]


class _Dropped(torch.autograd.Function):
    """A call of a checkpointed layer; the layer runs again before the call's backward, in R or, without an R, in B."""

    @staticmethod
    def forward(ctx: Any, call: _DroppedCall, wanted: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        outputs = call.run(tensors, ctx.needs_input_grad[2:])
        call.during_backward = call.store.put(partial(_DroppedCall.recompute, call))
        # Detached, because an input that the layer returns is not the output of this function.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with ctx.call.during_backward():
            return None, None, *ctx.call.run_backward(grads)
