"""Finds out which messages the stages of a pipeline exchange, by sending one microbatch through all stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.zero_bubble.pipeline.autocast import Autocast
from megatron.zero_bubble.pipeline.batches import Load, Microbatches, common_form
from megatron.zero_bubble.pipeline.failures import Failure
from megatron.zero_bubble.pipeline.gradients import TiedLayer
from megatron.zero_bubble.pipeline.held_layers import HeldLayers
from megatron.zero_bubble.pipeline.interconnect import HOST, Agreement, Interconnect
from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.pipeline.messages import MessageCommunicator, MessageSpec, StageMessage
from megatron.zero_bubble.runtime.variable_shapes import refuse_one_queue
from megatron.zero_bubble.schedule import Placement


class _Description(NamedTuple):
    """The properties of one rank's part of a step that all ranks compare."""

    form: str
    """A text with all properties of the rank on which message specs depend."""
    shapes_vary: bool
    """Whether the rank has the first stage and the shapes of inputs differ between microbatches."""
    tied: tuple[tuple[str, tuple[bool, ...]], ...]
    """One pair (key, `requires_grad` of each parameter) for each copy of a tied layer."""


class StepMessages:
    """Finds the message specs for each step of a pipeline; creating an instance is a collective call of all ranks.

    In the first step whose microbatches differ in shape, and in all later steps, a header message announces the shape
    of each activation.

    Args:
        held: the layers of this rank.
        tied: the layers of this rank that are tied across stages.
        shapes_vary: whether header messages announce the shapes of activations in every step.
    """

    def __init__(
        self,
        stage: LayerStage,
        placement: Placement,
        interconnect: Interconnect,
        agreement: Agreement,
        held: HeldLayers,
        tied: Sequence[TiedLayer],
        *,
        shapes_vary: bool,
    ) -> None:
        self._stage, self._placement, self._held, self._tied = stage, placement, held, tied
        self._interconnect, self._agreement = interconnect, agreement
        self._first, self._last = (placement.rank_of(stage) for stage in (0, placement.num_stages - 1))
        self._discovered: dict[tuple[object, ...], dict[int, MessageSpec]] = {}
        self.communicator = MessageCommunicator(interconnect.communicator(placement))
        self._trained_form: _Description | None = None
        """The result of `_describe` in the previous step; None unless the previous step was a training step."""
        self.shapes_vary = False
        if shapes_vary:
            self._open_headers()

    def _open_headers(self) -> None:
        self._agreement.together(lambda: refuse_one_queue(self._interconnect.device))
        self.communicator.take_headers(self._interconnect.communicator(self._placement, HOST))
        self.shapes_vary = True

    def begin(self, load: Load, autocast: Autocast, *, trains: bool) -> None:
        """Pass the data and the message specs of a step to this rank's `LayerStage`; a collective call of all ranks.

        Args:
            load: function that returns the step's microbatches, called on the ranks of the first and the last stage.

        Raises:
            ValueError: on all ranks, if the step's data are invalid, the forward of a layer fails, or the copies of a
                tied layer require gradients of different parameters.
        """
        described = self._agreement.collect(lambda: self._describe(load, autocast))
        if trains:
            _check_ties(described)
        if not self.shapes_vary and any(description.shapes_vary for description in described):
            self._open_headers()
        key = trains, *described
        if key not in self._discovered:
            if not self._discovered:
                # Each rank may have initialized its copies with other random numbers, for example in `Pipeline.apply`.
                for tied in self._tied:
                    tied.equalize()
            self._discovered[key] = self._discover()
            if any(len(spec.tensors) > 1 for spec in self._discovered[key].values()):
                device = self._interconnect.device
                self._agreement.together(lambda: refuse_one_queue(device, "messages of several tensors"))
        self._stage.expect(self._discovered[key], shapes_vary=self.shapes_vary)
        self._trained_form = described[self._interconnect.rank] if trains else None

    def begin_as_before(self, load: Load, autocast: Autocast) -> None:
        """Pass a training step's data to this rank's `LayerStage`, if possible without communication between ranks.

        The ranks communicate only in the first step, and in a training step that follows an evaluation step. A training
        step that follows a training step uses the message specs of the previous step. If the ranks do not communicate,
        an error in the step's data is recorded like the error of a failed forward.
        """
        if self._trained_form is None:
            self.begin(load, autocast, trains=True)
            if self.shapes_vary:
                raise ValueError("with post_validation=True all microbatches need inputs of the same shapes")
            return
        try:
            if self._describe(load, autocast) != self._trained_form:
                raise ValueError(
                    "with post_validation all training steps need inputs of the same form, the same autocast and the "
                    "same parameters that require gradients; before a change, call settle() and train_batch()"
                )
        except ValueError as error:
            self._stage.begin(Microbatches([], []), autocast)
            self._stage.failures.append(Failure(-1, self._interconnect.rank, str(error)))
            self._stage.cause = error.__cause__ if isinstance(error.__cause__, Exception) else error

    def _describe(self, load: Load, autocast: Autocast) -> _Description:
        """Pass the data of a step to this rank's `LayerStage`; return the properties that determine message specs."""
        rank = self._interconnect.rank
        microbatches = load() if rank in (self._first, self._last) else Microbatches([], [])
        self._stage.begin(microbatches, autocast)
        form, vary = common_form(microbatches.inputs) if rank == self._first else (None, False)
        if form is not None and (vary or self.shapes_vary):
            form = form.announced()
        tied = tuple(
            (key, tuple(parameter.requires_grad for parameter in copy.parameters()))
            for key, copies in self._held.tied.items()
            for copy in copies.values()
        )
        return _Description(f"{form!r} {autocast} {self._stage.described_parameters()}", vary, tied)

    def _discover(self) -> dict[int, MessageSpec]:
        """Return stage -> spec of the message that the stage sends to the next stage; a collective call of all ranks.

        Raises:
            ValueError: on all ranks, if the forward of a layer or the loss function fails.
        """
        specs: dict[int, MessageSpec] = {}
        incoming: StageMessage | None = None
        rank = self._interconnect.rank
        for sender in range(self._placement.num_stages):
            here = self._placement.rank_of(sender)
            outputs: list[StageMessage] = []

            def run() -> MessageSpec:
                outputs.append(self._stage.probe(sender, incoming))  # noqa: B023
                return outputs[0].spec  # noqa: B023

            spec = self._agreement.on(here, run)
            if sender == self._placement.num_stages - 1:
                break
            there = self._placement.rank_of(sender + 1)
            specs[sender] = spec.on(self._interconnect.device)
            incoming = None
            if rank == here == there:
                incoming = outputs[0].detach()
            elif rank == here:
                self.communicator.send(outputs[0], there).wait()
            elif rank == there:
                incoming = self.communicator.receive(here, specs[sender]).wait()
        return specs


def _check_ties(described: Sequence[_Description]) -> None:
    """Check that all copies of each tied layer require gradients of the same parameters, because the ranks sum them."""
    first: dict[str, tuple[bool, ...]] = {}
    for key, requires_grad in (pair for description in described for pair in description.tied):
        if first.setdefault(key, requires_grad) != requires_grad:
            raise ValueError(
                f"TiedLayerSpec({key!r}): requires_grad differs between copies of the layer: set it on all ranks alike"
            )
