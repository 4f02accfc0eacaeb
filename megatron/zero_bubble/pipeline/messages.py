"""Messages between stages: tensors in nested tuples, lists and dicts; a channel carries the tensors one by one.

The executor gets a `StageMessage` in place of a tensor, and a `MessageCommunicator` in place of a communicator. The
executor does not access the tensors inside a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, cast

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from megatron.zero_bubble.pipeline.graph_backward import run_backward
from megatron.zero_bubble.runtime.communicator import Communicator, PendingReceive, PendingSend, TensorSpec
from megatron.zero_bubble.runtime.variable_shapes import AnnouncedSpec, AnswerSpec, AnySpec, VariableCommunicator

Constant = None | bool | int | float | str
"""A constant in a message; constants are the same for every microbatch and are not sent."""


@dataclass(frozen=True)
class MessageSpec:
    """The properties of a message that a receiver must know before the message arrives."""

    template: Any
    """The output of a layer, with each tensor replaced by its spec."""
    needs_gradient: tuple[bool, ...]
    """For each tensor, whether the sending stage needs the tensor's gradient."""

    @property
    def tensors(self) -> list[AnySpec]:
        """The specs of the message's tensors, in the order of the tensors."""
        return [leaf for leaf in pytree.tree_leaves(self.template) if isinstance(leaf, AnySpec)]

    def gradients(self) -> MessageSpec:
        """Return the spec of the message that the receiver sends back: gradients of the tensors that need gradients."""
        specs = tuple(compress(self.tensors, self.needs_gradient))
        return MessageSpec(specs, (False,) * len(specs))

    def on(self, device: torch.device) -> MessageSpec:
        """Return this spec with the device of all tensors set to `device`."""
        template = pytree.tree_map_only(TensorSpec, lambda spec: replace(spec, device=device), self.template)
        return replace(self, template=template)

    def value_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put `tensors` into the structure of tuples, lists and dicts that this spec describes."""
        remaining = iter(tensors)
        return pytree.tree_map(lambda leaf: next(remaining) if isinstance(leaf, AnySpec) else leaf, self.template)

    def announced(self) -> MessageSpec:
        """Return this spec without shapes, for a receiver that learns the shapes of a message from headers."""
        announced = pytree.tree_map_only(TensorSpec, lambda spec: AnnouncedSpec(spec.dtype, spec.device), self.template)
        return replace(self, template=announced)

    def answering(self, find: Callable[[], Sequence[TensorSpec] | None]) -> MessageSpec:
        """Return this spec of gradients without its shapes; the receiver gets the shapes by calling `find`.

        `find` returns one `TensorSpec` for each gradient, or None if the shapes are not known yet.
        """

        def later(k: int) -> AnswerSpec:
            return AnswerSpec(lambda: None if (specs := find()) is None else specs[k])

        return replace(self, template=tuple(map(later, range(len(self.tensors)))))

    def has_form_of(self, other: MessageSpec, *, shapes_vary: bool = False) -> bool:
        """Tell whether two specs have equal structures, constants, types and (unless `shapes_vary` is set) shapes.

        The order of the keys in dicts does not matter; see `StageMessage.in_order_of`.
        """
        ours, theirs = (each.announced().template if shapes_vary else each.template for each in (self, other))
        return bool(ours == theirs or _with_one_nan(ours) == _with_one_nan(theirs))

    def differs_in_constants_only(self, other: MessageSpec) -> bool:
        """Tell whether two specs are equal except for constants and shapes."""
        ours, theirs = (
            pytree.tree_map(lambda leaf: leaf if isinstance(leaf, AnySpec) else None, each.announced().template)
            for each in (self, other)
        )
        return bool(ours == theirs)

    def __str__(self) -> str:
        return str(pytree.tree_map(_leaf_text, self.template))


class StageMessage:
    """A message between neighbouring stages: tensors, and the tuples, lists and dicts that contain the tensors.

    Args:
        spec: the structure of the message, and the shapes and types of the tensors.
        tensors: the tensors of the message, in the order of the spec.
    """

    def __init__(self, spec: MessageSpec, tensors: Sequence[torch.Tensor]) -> None:
        self.spec, self.tensors = spec, tuple(tensors)
        self._edges = tuple(
            get_gradient_edge(tensor) if needs and gets_gradient(tensor) else None
            for tensor, needs in zip(self.tensors, spec.needs_gradient, strict=True)
        )

    @classmethod
    def of(cls, value: Any) -> StageMessage:
        """Make a message from the output of a layer.

        Raises:
            ValueError: the output contains a value that cannot be sent, or contains no tensor.
        """
        leaves = pytree.tree_leaves(value)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | Constant):
                raise ValueError(
                    f"a {type(leaf).__name__} cannot pass between stages: give tensors, numbers, strings or None, in "
                    "tuples, lists and dicts"
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError(f"{value!r:.80} has no tensor to send to the next stage")
        template = pytree.tree_map_only(torch.Tensor, spec_of, value)
        return cls(MessageSpec(template, tuple(map(gets_gradient, tensors))), tensors)

    @classmethod
    def to_send(cls, value: Any, device: torch.device) -> StageMessage:
        """Make a message for the next stage from the output of a layer.

        Raises:
            ValueError: the output contains no tensor, or contains a sparse tensor, a tensor that is not on `device`, or
                a value that cannot be sent.
        """
        message = cls.of(value)
        for tensor in message.tensors:
            if tensor.layout is not torch.strided:
                name = str(tensor.layout).removeprefix("torch.")
                raise ValueError(f"a {name} tensor cannot be sent to the next stage: return a dense tensor")
            if tensor.device != device:
                raise ValueError(f"a tensor on {tensor.device} cannot be sent to the next stage: move it to {device}")
        return message

    def in_order_of(self, spec: MessageSpec) -> StageMessage:
        """Return this message with the keys of its dicts, and so its tensors, in the order of `spec`."""
        structure = pytree.tree_structure(spec.template)
        if structure == pytree.tree_structure(self.spec.template):
            return self
        return StageMessage.of(pytree.tree_unflatten(structure.flatten_up_to(self.value), structure))

    @property
    def value(self) -> Any:
        """The tensors and constants of the message, inside the tuples, lists and dicts that layers take and return."""
        return self.spec.value_of(self.tensors)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Run the backward of this message's autograd graph; `grads` are the gradients of the message's tensors."""
        pairs = [
            (edge, grad) for edge, grad in zip(self._edges, grads, strict=True) if edge is not None and grad is not None
        ]
        run_backward([edge for edge, _ in pairs], [grad for _, grad in pairs], accumulates=True)

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """The tensors of the message whose gradients the sender needs."""
        return list(compress(self.tensors, self.spec.needs_gradient))

    def requires_grad_(self) -> None:
        """Set `requires_grad` of tensors whose gradients the sender needs; called by the executor after a receive."""
        for tensor in self.differentiable:
            tensor.requires_grad_()

    def detach(self) -> StageMessage:
        """Return a message with the same values but without an autograd graph, for a stage on the same rank."""
        return StageMessage(self.spec, [tensor.detach() for tensor in self.tensors])

    def release(self) -> None:
        """Drop the message's tensors; autograd keeps the tensors that the backward needs."""
        self.tensors = ()

    def spread(self, gradients: StageMessage) -> list[torch.Tensor | None]:
        """Return the gradients of all tensors of this message, with None for each tensor that needs no gradient."""
        given = iter(gradients.tensors)
        return [next(given) if needs else None for needs in self.spec.needs_gradient]

    def take_gradients(self) -> StageMessage:
        """Return a message with the gradients of this message's tensors; the gradient of an unused tensor is zero."""
        grads = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in self.differentiable]
        return StageMessage(self.spec.gradients(), grads)


def gets_gradient(tensor: torch.Tensor) -> bool:
    """Whether autograd computes a gradient of `tensor`.

    A view of a parameter that was made under `torch.no_grad` has `requires_grad`, but is not in an autograd graph.
    """
    if tensor.grad_fn is not None or not tensor.requires_grad:
        return tensor.requires_grad
    return tensor._base is None or not tensor._base.requires_grad


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside the tuples, lists and dicts of `value`."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def may_need_gradients(tensors: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """Return whether each tensor has a type with gradients.

    A layer that skips the first microbatch, as with LayerDrop, may train in later ones; its outputs then count as
    tensors that need gradients in every microbatch.
    """
    return tuple(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def refuse_new_gradients(needs: Iterable[tuple[bool, bool]], source: str) -> None:
    """Check that no tensor needs a gradient that needed none in the first microbatch.

    Args:
        needs: for each tensor, whether it needs a gradient in this microbatch, and whether it did in the first.
        source: the rest of the clause "tensor 0 that ...", for the error message.

    Raises:
        ValueError: a tensor needs a gradient that needed none in the first microbatch.
    """
    needs = list(needs)
    if (True, False) in needs:
        raise ValueError(
            f"tensor {needs.index((True, False))} that {source} requires a gradient, but did not in the first "
            "microbatch: compute it from parameters in every microbatch or in none"
        )


def clone_tensors(value: Any) -> Any:
    """Return a copy of `value` in which every tensor is cloned."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def versions_of(value: Any) -> list[int]:
    """Return how often each tensor in `value` was changed in place; inference tensors do not count."""
    return [tensor._version for tensor in tensors_in(value) if not tensor.is_inference()]


def _with_one_nan(template: Any) -> Any:
    """Replace every NaN in `template` by the object `math.nan`, so that templates with NaN can compare equal."""
    return pytree.tree_map_only(float, lambda value: math.nan if math.isnan(value) else value, template)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return the shape, type and device of a tensor.

    Raises:
        ValueError: no channel can carry the tensor.
    """
    is_strided_nested = tensor.is_nested and tensor.layout is torch.strided
    for kind, applies in (("nested", is_strided_nested), ("quantized", tensor.is_quantized), ("meta", tensor.is_meta)):
        if applies:
            raise ValueError(f"a {kind} tensor cannot pass between stages: return a dense tensor")
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device)


class _Words(str):
    """A string whose `repr` has no quotes, so that printed tuples and dicts show the string without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _leaf_text(leaf: AnySpec | Constant) -> _Words:
    if not isinstance(leaf, TensorSpec | AnnouncedSpec):
        return _Words(repr(leaf))
    shape = list(leaf.shape) if isinstance(leaf, TensorSpec) else "[any]"
    return _Words(f"{str(leaf.dtype).removeprefix('torch.')}{shape}")


class MessageCommunicator:
    """Sends and receives the tensors of a `StageMessage` one by one over the communicator `inner`."""

    def __init__(self, inner: Communicator) -> None:
        self._inner: Communicator | VariableCommunicator = inner

    def take_headers(self, headers: Communicator) -> None:
        """From now on, send the shapes of activations over the communicator `headers`; see `VariableCommunicator`."""
        self._inner = VariableCommunicator(self._inner, headers)

    def announce(self, message: StageMessage, destination: int) -> PendingSend:
        """Send the shapes of an activation's tensors to the rank `destination`, if the shapes of activations vary."""
        if not isinstance(self._inner, VariableCommunicator):
            return _Sends([])
        return _Sends([self._inner.announce(tensor, destination) for tensor in message.tensors])

    def send(self, message: StageMessage, destination: int) -> PendingSend:
        return _Sends([self._inner.send(tensor.detach(), destination) for tensor in message.tensors])

    def receive(self, source: int, spec: MessageSpec) -> _Receives:
        # Unless there are headers, all specs have shapes.
        return _Receives(spec, [self._inner.receive(source, cast(TensorSpec, tensor)) for tensor in spec.tensors])


@dataclass(frozen=True)
class _Sends:
    sends: list[PendingSend]

    def is_done(self) -> bool:
        return all(send.is_done() for send in self.sends)

    def wait(self) -> None:
        for send in self.sends:
            send.wait()


@dataclass(frozen=True)
class _Receives:
    spec: MessageSpec
    receives: list[PendingReceive]

    def wait(self) -> StageMessage:
        return StageMessage(self.spec, [receive.wait() for receive in self.receives])
