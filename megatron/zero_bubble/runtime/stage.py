"""The interface between an `Executor` and the model: the computation of one rank's stages."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.schedule import Op


class Stage(Protocol):
    """The computation of one rank's model chunks."""

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        """Run one microbatch forward; `input_tensor` is None on the first stage.

        Returns what the next stage receives, or on the last stage the loss.
        """
        ...

    def backward(
        self,
        microbatch: int,
        chunk: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run one microbatch backward; `output_grad` is None on the last stage.

        Returns the gradient of `input_tensor`, or None on the first stage.
        """
        ...

    def release_output(self, output_tensor: torch.Tensor) -> None:
        """Free the values of an output that has been handed on: only its place in the autograd graph is needed.

        A stage that frees nothing early need not define it.
        """
        return

    def before_gradients(self, op: Op) -> None:
        """Prepare for a B, W or BW, the operations that add to parameters' gradients.

        Where the W of several microbatches run as one, it is called before each parameter's share of each.
        A stage without anything to prepare need not define it.
        """
        return

    def message_spec(self, op: Op) -> TensorSpec:
        """Return shape, type and device of the message that the receive `op` brings."""
        ...


class SteppingStage(Stage, Protocol):
    """A stage that takes the optimizer's step itself: what a schedule with post-validation runs."""

    def step(self) -> None:
        """Step as soon as this rank's gradients are there, before the state of the other ranks' is known."""
        ...

    def validate(self) -> bool:
        """Confirm or amend the last step; return whether this step's forwards used wrong weights on any rank."""
        ...

    def restart(self) -> None:
        """Forget the forwards of this step: they are run again, on the same data, in the same order."""
        ...
