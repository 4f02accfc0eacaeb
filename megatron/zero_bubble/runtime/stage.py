"""The interface through which an `Executor` runs the computation of one rank's stages."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.schedule import Op


class Stage(Protocol):
    """The computation of one rank's model chunks in one step."""

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        """Run the forward of one microbatch; `input_tensor` is None on the first stage.

        Returns the message for the next stage, or on the last stage the loss.
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
        """Run the backward of one microbatch; `output_grad` is None on the last stage.

        Returns the gradient of `input_tensor`, or None on the first stage.
        """
        ...

    def release_output(self, output_tensor: torch.Tensor) -> None:
        """Free the values of an output that was passed on; a backward needs only the output's place in the graph.

        A stage that frees nothing early need not define this method.
        """
        return

    def before_inputs(self, op: Op) -> None:
        """Prepare for an F, B or BW whose message may still be under way.

        A stage without anything to prepare need not define this method.
        """
        return

    def before_gradients(self, op: Op) -> None:
        """Prepare for a B, W or BW, the operations that add to parameters' gradients.

        If the W of several microbatches run as one, `before_gradients` is called for each microbatch of each parameter.
        A stage without anything to prepare need not define this method.
        """
        return

    def message_spec(self, op: Op) -> TensorSpec:
        """Return shape, type and device of the message that the receive `op` waits for."""
        ...


class PairingStage(Stage, Protocol):
    """A stage that runs the forward and the backward of a pair as one, so that their exchanges overlap with computing.

    Other stages run the forward and the backward one after the other.
    """

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

        The arguments and results are the same as in `Stage.forward` and `Stage.backward`.
        """
        ...


class SteppingStage(Stage, Protocol):
    """A stage that also takes the optimizer's step, for schedules with post-validation."""

    def step(self) -> None:
        """Take the optimizer's step with this rank's complete gradients, before the other ranks' state is known."""
        ...

    def validate(self) -> bool:
        """Confirm or amend the last optimizer step; return, equally on all ranks, whether forwards must run again."""
        ...

    def restart(self) -> None:
        """Undo the forwards of the current step, which are run again on the same data in the same order."""
        ...


class VocabularyStage(Stage, Protocol):
    """A stage whose rank also has a vocabulary shard, for schedules with operations on shards.

    The forward of the first stage starts from the result of E and EMBEDDED, and the backward of the last stage starts
    from the gradient that L computes. The stage keeps the intermediate results that operations pass to each other, by
    microbatch.
    """

    def run_on_shard(self, op: Op) -> None:
        """Run an E, EW, S, L or T of this rank, whose inputs have arrived."""
        ...

    def exchange(self, op: Op) -> None:
        """Take part in a collective of all ranks, such as HIDDEN.

        `exchange` is called on a separate lane, beside the computation (see `ExchangeLane`): on a GPU inside a stream
        that has waited for all earlier operations, on a CPU in a thread. The results may be used and freed anywhere,
        because the next exchange in the lane waits for all earlier computation. A tensor that `exchange` reads must not
        be freed until this rank has waited for a later exchange.
        """
        ...
