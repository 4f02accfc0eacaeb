"""Runs the forward and the backward of the layers of one rank, for the executor of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.batches import Microbatches
from megatron.zero_bubble.pipeline.called_modules import inside_sharded
from megatron.zero_bubble.pipeline.failures import Failure, failing_as
from megatron.zero_bubble.pipeline.first_backward import is_needed, run_first_backward
from megatron.zero_bubble.pipeline.forward_state import ForwardState, renormalized, without_trace
from megatron.zero_bubble.pipeline.graph_backward import owning_gradients
from megatron.zero_bubble.pipeline.messages import (
    MessageSpec,
    StageMessage,
    clone_tensors,
    may_need_gradients,
    refuse_new_gradients,
    spec_of,
    versions_of,
)
from megatron.zero_bubble.pipeline.shared_state import parameters_behind
from megatron.zero_bubble.pipeline.specs import FunctionLayer
from megatron.zero_bubble.pipeline.weight_split import unsplit
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.schedule import Op, OpKind, Placement
from megatron.zero_bubble.schedule.errors import one_line


@dataclass(frozen=True)
class HeldLayer:
    """A layer that one rank holds."""

    index: int
    """Position of the layer among all layers of the model."""
    class_name: str
    module: torch.nn.Module
    call: Callable[[Any], Any]
    """The function that runs the layer: the module, the `forward` of a `TiedLayerSpec`, or a `DroppingLayer`."""


class LayerStage:
    """Computes F and B of the layers of one rank; implements `SteppingStage` with `StageMessage`s in place of tensors.

    The error of a failed forward or backward is recorded, and zeros replace the missing tensors. All ranks finish the
    step, so that no rank waits forever and all ranks can raise the same error.

    Args:
        chunks: for each stage of the rank, a list of the stage's layers.
        loss_fn: function that computes the loss from the last layer's output and the targets of a microbatch.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[HeldLayer]],
        placement: Placement,
        rank: int,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.chunks = chunks
        self.stages = placement.stages_of(rank)
        self._last = placement.num_stages - 1
        self._loss_fn, self.device = loss_fn, device
        self._changes_input, self._has_run_backward = set[int](), set[int]()
        self._changes_target = False
        self.validate: Callable[[], bool]
        """Function that validates the last optimizer step, if post-validation is used; see `SteppingStage.validate`."""
        self._restored_modules = [layer.module for chunk in chunks for layer in chunk]
        if isinstance(loss_fn, torch.nn.Module) and self._last in self.stages:
            self._restored_modules.append(loss_fn)
        self.expect({}, shapes_vary=False)
        self.begin(Microbatches([], []), Autocast.current(device.type))

    def begin(self, microbatches: Microbatches, autocast: Autocast) -> None:
        """Set the data of a step; `microbatches` is empty on ranks that hold neither the first nor the last stage."""
        self.microbatches, self.autocast = microbatches, autocast
        # The layers may have been sharded after the pipeline was built.
        unsplit(inside_sharded(layer.module for chunk in self.chunks for layer in chunk))
        self._parameters = [[each for layer in chunk for each in layer.module.parameters()] for chunk in self.chunks]
        self._places: Sequence[int] = ()
        self.forget_forwards()

    def reorder(self, places: Sequence[int]) -> None:
        """Reorder the step's microbatches: microbatch k of the schedule is microbatch `places[k]` of the data."""
        self._places = places
        if self.microbatches.targets:
            self.microbatches = Microbatches(*([values[n] for n in places] for values in self.microbatches))

    def expect(self, sent: Mapping[int, MessageSpec], *, shapes_vary: bool) -> None:
        """Set the structure, shapes and types of the message that each stage sends to the next stage.

        If `shapes_vary` is set, the shapes of a microbatch's messages may differ from the shapes in `sent`.
        """
        self._sent, self._shapes_vary = sent, shapes_vary
        self._expected = {stage: spec.announced() if shapes_vary else spec for stage, spec in sent.items()}

    def described_parameters(self) -> list[tuple[bool, torch.dtype]]:
        """Return `requires_grad` and type of this rank's parameters, which decide what messages the stages exchange."""
        return [(each.requires_grad, each.dtype) for parameters in self._parameters for each in parameters]

    def forget_forwards(self) -> None:
        """Discard the losses, the failures and the gradients' shapes that this step's forwards have recorded."""
        self.losses: dict[int, torch.Tensor] = {}
        self.failures: list[Failure] = []
        self.cause: Exception | None = None
        self._gradients: dict[tuple[int, int], list[TensorSpec]] = {}

    def remember(self) -> None:
        """Save the random states and buffers, in case the forwards before the operation VALIDATE have to run again."""
        self._remembered = ForwardState(self._restored_modules, self.device)

    def restart(self) -> None:
        self._remembered.restore()
        torch.clear_autocast_cache()
        of_data, cause = [failure for failure in self.failures if failure.microbatch < 0], self.cause
        self.forget_forwards()
        if of_data:  # Repeated forwards do not find the error in the step's data again.
            self.failures, self.cause = of_data, cause

    def step(self) -> None:
        """Do nothing: `train_step` sums gradients over tied copies and replicas, then takes the optimizer's step."""

    def end(self) -> torch.Tensor | None:
        """Release the data of the step, and return the step's loss; None if the last stage is not on this rank."""
        losses = [self.losses[microbatch] for microbatch in sorted(self.losses)]
        self.microbatches, self.losses, self._gradients = Microbatches([], []), {}, {}
        return sum(losses[1:], start=losses[0]) if losses else None

    def forward(self, microbatch: int, chunk: int, message: StageMessage | None) -> StageMessage:
        stage = self.stages[chunk]
        output = None
        with self.recording(microbatch, chunk):
            output = self._forward(microbatch, chunk, message)
        output = output or self._zeros(stage)
        if stage == self._last:
            self.losses[microbatch] = output.tensors[0].detach()
        elif self._shapes_vary:
            # The gradients of these tensors will have the same shapes.
            self._gradients[stage, microbatch] = [spec_of(tensor) for tensor in output.differentiable]
        return output

    @contextmanager
    def recording(self, microbatch: int, chunk: int, kind: str = "") -> Iterator[None]:
        """Record an error in the `with` block; `kind` is the failed operation, if the error does not name a layer."""
        try:
            yield
        except Exception as error:
            number, stage = self._places[microbatch] if self._places else microbatch, self.stages[chunk]
            problem = f"{kind} of stage {stage} failed: {type(error).__name__}: " if kind else ""
            self.failures.append(Failure(microbatch, stage, f"microbatch {number}: {problem}{one_line(error)}"))
            self.cause = self.cause or error

    def _forward(self, microbatch: int, chunk: int, message: StageMessage | None) -> StageMessage:
        stage = self.stages[chunk]
        with self.autocast.forward():
            value = self.microbatches.inputs[microbatch] if message is None else message.value
            if chunk in self._changes_input:
                value = clone_tensors(value)
            for layer in self.chunks[chunk]:
                value = _checked_call(layer, value)
            if stage == self._last:
                # The loss is divided before its backward, as in a single process that accumulates gradients.
                target = self.microbatches.targets[microbatch]
                loss = self._checked_loss(value, clone_tensors(target) if self._changes_target else target)
                return StageMessage.of(loss / len(self.microbatches.targets))
        output, expected = StageMessage.to_send(value, self.device), self._expected[stage]
        if not output.spec.has_form_of(expected, shapes_vary=self._shapes_vary):
            problem = f"stage {stage} sends {output.spec}, but the next stage expects {expected}"
            if not self._shapes_vary and output.spec.has_form_of(expected, shapes_vary=True):
                problem += ": give variable_shapes=True if layers change shapes beyond those of the inputs"
            elif output.spec.differs_in_constants_only(expected):
                problem += ": numbers and strings must be equal in all microbatches, so send a tensor"
            raise ValueError(problem)
        output = output.in_order_of(expected)
        needs = zip(output.spec.needs_gradient, expected.needs_gradient, strict=True)
        refuse_new_gradients(needs, f"stage {stage} sends")
        return StageMessage(expected, output.tensors)

    def _zeros(self, stage: int) -> StageMessage:
        """Return zeros in place of a stage's output, after the stage's forward has failed."""
        if stage == self._last:
            return StageMessage.of(torch.zeros((), device=self.device))
        specs = self._sent[stage].tensors
        zeros = [torch.zeros_like(spec.empty()) for spec in specs if isinstance(spec, TensorSpec)]
        return StageMessage(self._expected[stage], zeros)

    def backward(
        self,
        microbatch: int,
        chunk: int,
        input_message: StageMessage | None,
        output: StageMessage,
        output_grads: StageMessage | None,
    ) -> StageMessage | None:
        grads = output.spread(output_grads) if output_grads is not None else [torch.ones_like(output.tensors[0])]
        with self.recording(microbatch, chunk, "backward"), owning_gradients(self._parameters[chunk]):
            output.backward(grads)
        return None if input_message is None else input_message.take_gradients()

    def release_output(self, output: StageMessage) -> None:
        output.release()

    def before_inputs(self, op: Op) -> None:
        return

    def before_gradients(self, op: Op) -> None:
        return

    def message_spec(self, op: Op) -> MessageSpec:
        stage = self.stages[op.chunk]
        if op.kind is OpKind.RECV_FORWARD:
            return self._expected[stage - 1]
        gradients = self._expected[stage].gradients()
        if self._shapes_vary:
            return gradients.answering(partial(self._gradients.get, (stage, op.microbatch)))
        return gradients

    def probe(self, stage: int, message: StageMessage | None) -> StageMessage:
        """Run the forward of `stage` on the first microbatch without side effects; return the stage's output.

        Raises:
            ValueError: a layer or the loss function fails, or returns a value of an unsupported type.
        """
        chunk = self.stages.index(stage)
        if message is not None:
            message.requires_grad_()
        with without_trace(self._restored_modules, self.device), self.autocast.forward():
            inputs = clone_tensors(self.microbatches.inputs[0] if message is None else message.value)
            value, before = inputs, versions_of(inputs)
            is_apart = message is not None or not StageMessage.of(inputs).differentiable
            runs_backward = is_needed(self.device) and is_apart and chunk not in self._has_run_backward
            own = {parameter for layer in self.chunks[chunk] for parameter in layer.module.parameters()}
            seen: set[Any] = set()
            for layer in self.chunks[chunk]:
                with _refusing_changes(layer):
                    value = _checked_call(layer, value)
                used = set(parameters_behind(value, seen))
                # A module may compute with other parameters than its own, as with `fully_shard`.
                if isinstance(layer.module, FunctionLayer) and not used <= own:
                    raise ValueError(
                        f"layer {layer.index} ({layer.class_name}) uses a parameter of no layer of stage {stage}: make "
                        "it a module that has the parameter, or a TiedLayerSpec with forward=..."
                    )
            if before != versions_of(inputs):
                # Autograd refuses in-place changes of a received tensor and of a part of a batch whose other parts are
                # in use, so the layers get a copy.
                self._changes_input.add(chunk)
            if stage == self._last:
                target = clone_tensors(self.microbatches.targets[0])
                before = versions_of(target)
                value = self._checked_loss(value, target)
                if not own.issuperset(parameters_behind(value, seen)):
                    raise ValueError(
                        f"loss_fn uses a parameter of no layer of stage {stage}, the last: make the parameter and the "
                        "part of the loss that uses it a layer"
                    )
                # A forward may run more than once, so the loss gets a copy of a target that it changes in place.
                self._changes_target = self._changes_target or before != versions_of(target)
            if runs_backward:
                self._has_run_backward.add(chunk)
                run_first_backward(value, own, self.device)
        try:
            output = StageMessage.to_send(value, self.device)
        except ValueError as error:
            last = self.chunks[chunk][-1]
            raise ValueError(f"layer {last.index} ({last.class_name}), the last of stage {stage}: {error}") from None
        is_trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in own)
        if is_trained and not any(output.spec.needs_gradient):
            spec = replace(output.spec, needs_gradient=may_need_gradients(output.tensors))
            return StageMessage(spec, output.tensors)
        return output

    def _checked_loss(self, output: Any, target: Any) -> torch.Tensor:
        with failing_as("loss_fn"):
            loss = self._loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a tensor with one number, got {got}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss depends on no parameter that requires a gradient")
        if loss.is_complex():
            raise ValueError("loss_fn must return a real number, got a complex number")
        return loss


@contextmanager
def _refusing_changes(layer: HeldLayer) -> Iterator[None]:
    """Raise `ValueError` if the layer's forward, which may run more than once, changes a parameter of the layer.

    The weights of embeddings with `max_norm` may change, because `ForwardState` restores these weights.
    """
    tables = {table.weight for table in renormalized(layer.module)}
    parameters = {name: each for name, each in layer.module.named_parameters() if each not in tables}
    before = versions_of(parameters)
    yield
    for name, old, new in zip(parameters, before, versions_of(parameters), strict=True):
        if old != new:
            raise ValueError(
                f"layer {layer.index} ({layer.class_name}) changes its parameter {name} in its forward: make the "
                "parameter a buffer"
            )


def _checked_call(layer: HeldLayer, value: Any) -> Any:
    with failing_as(f"layer {layer.index} ({layer.class_name})"):
        result = layer.call(value)
    if result is None:
        raise ValueError(f"layer {layer.index} ({layer.class_name}) returned None, not the input of the next layer")
    return result
