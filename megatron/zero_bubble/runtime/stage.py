"""Defines the interface with which an `Executor` runs the computation of pipeline stages."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.schedule import Op


class Stage(Protocol):
    """Computes the model chunks of one rank in one step."""

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        """Run the forward of one microbatch, with None as `input_tensor` on the first stage.

        Returns:
            The output for the next stage; on the last stage, the loss.
        """

    def backward(
        self,
        microbatch: int,
        chunk: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run the backward of one microbatch, with None as `output_grad` on the last stage.

        Returns:
            The gradient of `input_tensor`, or None on the first stage.
        """

    def release_output(self, output_tensor: torch.Tensor) -> None:
        """Free the values of an output passed to the next stage; the backward needs only the output's autograd node.

        A stage need not implement `release_output`.
        """
        return

    def before_inputs(self, op: Op) -> None:
        """Prepare for an F, B or BW before its inputs arrive. A stage need not implement `before_inputs`."""
        return

    def before_gradients(self, op: Op) -> None:
        """Prepare for an operation that adds to the gradients of parameters, such as a B, W or BW.

        If the W of several microbatches run as one operation, `before_gradients` is called once for each parameter and
        microbatch. A stage need not implement `before_gradients`.
        """
        return

    def message_spec(self, op: Op) -> TensorSpec:
        """Return the shape, type and device of the message that the operation `op` receives."""


class PairingStage(Stage, Protocol):
    """A stage that runs a forward and a backward as one operation, so that token exchanges overlap with computation."""

    def forward_backward(
        self,
        forward: Op,
        input_tensor: torch.Tensor | None,
        backward: Op,
        backward_input: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a forward and the backward of another microbatch or chunk as one operation.

        Args:
            forward: the forward operation.
            input_tensor: the input of `forward`; None on the first stage.
            backward: the backward operation.
            backward_input: the input of the forward that belongs to `backward`; None on the first stage.
            output_tensor: the output of the forward that belongs to `backward`.
            output_grad: the gradient of `output_tensor`; None on the last stage.

        Returns:
            The output of `forward`, and the gradient of `backward_input` (None on the first stage).
        """


class SteppingStage(Stage, Protocol):
    """A stage that also runs the optimizer's step, for schedules with post-validation."""

    def step(self) -> None:
        """Run the optimizer's step with this rank's complete gradients, before the norm of all gradients is known."""

    def validate(self) -> bool:
        """Confirm or amend the last optimizer step.

        Returns:
            Whether forwards must run again; the result is the same on all ranks.
        """

    def restart(self) -> None:
        """Discard the forwards of the current step, which will run again on the same data in the same order."""


class VocabularyStage(Stage, Protocol):
    """A stage whose rank also has a vocabulary shard, for schedules with operations on shards.

    The forward of the first stage starts from the embeddings, which the operation E computes and the collective
    EMBEDDED sums over ranks. The backward of the last stage starts from the gradient that the loss operation L
    computes. For each microbatch, the stage keeps the results that operations on shards pass to later operations.
    """

    def run_on_shard(self, op: Op) -> None:
        """Run the operation `op` (E, EW, S, L or T) on this rank's vocabulary shard."""

    def exchange(self, op: Op) -> None:
        """Take part in a collective of all ranks, such as HIDDEN, the broadcast of the last stage's output.

        An `ExchangeLane` calls `exchange` while the rank computes. On a GPU, the call runs in a stream that has waited
        for all earlier operations; on a CPU, it runs in a thread. Any operation may use and free the results of
        `exchange`, because the next call of `exchange` waits for all computation launched earlier. A tensor that
        `exchange` reads must not be freed until this rank has waited for the same or a later collective.
        """
