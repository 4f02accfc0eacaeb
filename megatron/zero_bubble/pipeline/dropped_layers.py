"""Layers with activation recomputation: F drops a layer's activations, and R runs the layer again before B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.messages import (
    MessageSpec,
    StageMessage,
    clone_tensors,
    gets_gradient,
    may_need_gradients,
    refuse_new_gradients,
    tensors_in,
    versions_of,
)
from megatron.zero_bubble.runtime.recomputation_store import Blocks, ForwardMode, RecomputationStore

Layer = Callable[[Any], Any]


class DroppingLayer:
    """Runs a checkpointed layer; `Blocks.mode` decides whether F keeps or drops the layer's activations.

    Args:
        layer: the function that runs the layer.
        module: the module with the layer's parameters.
    """

    def __init__(self, layer: Layer, module: torch.nn.Module, store: RecomputationStore, device: torch.device) -> None:
        self._layer, self._module, self._store, self._device = layer, module, store, device
        self._needs_gradient: dict[tuple[tuple[bool, ...], ...], tuple[bool, ...]] = {}
        """(whether each input needs a gradient, `requires_grad` of each parameter) -> whether each output does."""

    def __call__(self, value: Any) -> Any:
        blocks = self._store.current
        if blocks is None:
            return self._probe(value) if torch.is_grad_enabled() else self._layer(value)
        message = StageMessage.of(value)
        # A layer that skips some microbatches, as with LayerDrop, changes the needs of the following layers.
        *_, of_last_probe = self._needs_gradient.values()
        needs_gradient = self._needs_gradient.get(self._needs_before(value), of_last_probe)
        if not any(needs_gradient):  # without a backward, autograd keeps no activations
            return self._layer(value)
        if blocks.mode is ForwardMode.KEEP:
            output = self._layer(value)
            blocks.keep(message.tensors, StageMessage.of(output).tensors)
            return output
        call = _DroppedCall(self._layer, message.spec, needs_gradient, blocks, Autocast.current(self._device.type))
        # An extra input always needs a gradient: a layer whose other inputs need none would otherwise have no backward.
        dummy = torch.empty(0, requires_grad=True)
        outputs = _Dropped.apply(call, dummy, *message.tensors)
        assert call.returned is not None
        return call.returned.value_of(outputs)

    def _needs_before(self, value: Any) -> tuple[tuple[bool, ...], ...]:
        return _needs_of(value), tuple(parameter.requires_grad for parameter in self._module.parameters())

    def _probe(self, value: Any) -> Any:
        """Run the layer, and find out which outputs need gradients and whether the layer changes its input in place.

        If the layer changes its input in place, the layer gets a copy of its input in later calls. Without a copy of
        the input, F would overwrite the input that R needs, and in R autograd would refuse the in-place change of a
        leaf tensor.
        """
        before, needs_before = versions_of(value), self._needs_before(value)
        output = self._layer(value)
        needs = _needs_of(output)
        if not any(needs) and any(parameter.requires_grad for parameter in self._module.parameters()):
            needs = may_need_gradients(tensors_in(output))
        self._needs_gradient[needs_before] = needs
        if before != versions_of(value):
            layer = self._layer
            self._layer = lambda value: layer(clone_tensors(value))
        return output


class _DroppedCall:
    """A call of a checkpointed layer, computed in F without an autograd graph and repeated in R with a graph.

    Args:
        outputs_need: for each output, whether it needs a gradient.
    """

    def __init__(
        self, layer: Layer, input_spec: MessageSpec, outputs_need: Sequence[bool], blocks: Blocks, autocast: Autocast
    ) -> None:
        self._layer, self._input_spec, self._autocast = layer, input_spec, autocast
        self.outputs_need, self.blocks = outputs_need, blocks
        self.returned: MessageSpec | None = None
        self._inputs: Sequence[torch.Tensor] = ()
        self._output: StageMessage | None = None

    def run(self, tensors: tuple[torch.Tensor, ...], needs_gradient: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Compute F of the layer, and keep the layer's inputs and the states of the random number generators for R."""
        self._inputs, self._needs_gradient = tensors, needs_gradient
        self._versions = versions_of(list(tensors))
        self._random_state, self._device_states = torch.get_rng_state(), get_device_states(*tensors)
        with torch.no_grad(), self._autocast.forward(keeps_casts=False):
            # Detached, because a view of an input that needs a gradient would need one, too, but has no graph.
            inputs = [tensor.detach() for tensor in tensors]
            output = StageMessage.of(self._layer(self._input_spec.value_of(inputs)))
        self.returned = output.spec
        return output.tensors

    def recompute(self) -> None:
        """Compute R of the layer: repeat F with the same inputs and random states, and record an autograd graph."""
        if versions_of(list(self._inputs)) != self._versions:
            raise ValueError("a later layer has changed the input of a checkpointed layer in place: change a copy")
        pairs = zip(self._inputs, self._needs_gradient, strict=True)
        self._inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        devices, states = self._device_states
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), self._autocast.forward():
            torch.set_rng_state(self._random_state)
            set_device_states(devices, states)
            self._output = StageMessage.of(self._layer(self._input_spec.value_of(self._inputs)))
        needs = zip(self._output.spec.needs_gradient, self.outputs_need, strict=False)
        refuse_new_gradients(needs, "a checkpointed layer returns")
        self._output.release()

    def run_backward(self, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        assert self._output is not None, "backward of a layer before its R"
        self._output.backward(grads)
        inputs, self._inputs, self._output = self._inputs, (), None
        return [tensor.grad for tensor in inputs]


def _needs_of(value: Any) -> tuple[bool, ...]:
    """Return, for each tensor in `value`, whether autograd computes the tensor's gradient."""
    return tuple(map(gets_gradient, tensors_in(value)))


class _Dropped(torch.autograd.Function):
    """Autograd function of a checkpointed layer; the forward repeats in R, or in B if R restores only later layers."""

    @staticmethod
    def forward(ctx: Any, call: _DroppedCall, dummy: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        outputs = call.run(tensors, ctx.needs_input_grad[2:])
        ctx.during_backward = call.blocks.put(call.recompute)
        # Detached, because an input that the layer returns is not the output of this function.
        outputs = tuple(output.detach() for output in outputs)
        pairs = zip(outputs, call.outputs_need, strict=False)
        ctx.mark_non_differentiable(*(output for output, needs in pairs if not needs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with ctx.during_backward():
            return None, None, *ctx.call.run_backward(grads)
