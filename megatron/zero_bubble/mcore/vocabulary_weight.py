"""One rank's rows of the embedding or of the output weights, and their gradient, which it hands to DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.zero_bubble.mcore.transformer_engine import placeholder_gradient
from megatron.zero_bubble.mcore.vocabulary_shard import Rows, add_embedding_gradient
from megatron.zero_bubble.mcore.weight_grad import add_to_main_grad


class ShardWeight(torch.nn.Module):
    """The rows of one shard as a parameter. Calling the module returns it, so that DDP's forward hooks run.

    The gradient is added up in `main_grad` if DDP has made one, else in `weight.grad`. DDP is told by its own hook, as
    for W (see `weight_grad.py`), once the gradient of the last microbatch is there.

    Args:
        values: [rows, hidden], copied.
        rows: their place in the vocabulary.
        attributes: of megatron-core's parameter, which this one takes over.
        num_uses: 2 for tied weights, which have the gradients of the embedding and of the output layer, else 1.

    Attributes:
        embedding_sum: where gradients of the embedding are added up, if not in `main_grad`; None between steps.
    """

    def __init__(self, values: torch.Tensor, rows: Rows, attributes: Mapping[str, Any], num_uses: int) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(values.detach().clone())
        for name, value in attributes.items():
            setattr(weight, name, value)
        # Tells DDP that the gradient comes through the hook that it registers below, not from autograd.
        weight.skip_backward_post_hook = True
        self.weight = weight
        self.rows, self.num_uses = rows, num_uses
        self.embedding_sum: torch.Tensor | None = None
        self._num_complete = 0
        self._hook: Callable[[], None] | None = None

    def forward(self) -> torch.Tensor:
        return self.weight

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Take the hook by which DDP counts the gradient as ready; DDP calls this."""
        self._hook = hook

    def add_output_gradient(self, logits_gradient: torch.Tensor, hidden: torch.Tensor, *, is_fused: bool) -> None:
        """Add the gradient of the output layer for one microbatch.

        Args:
            logits_gradient: [n, rows].
            hidden: [n, hidden].
            is_fused: add the product straight into `main_grad`, with apex' kernel.
        """
        if is_fused and hasattr(self.weight, "main_grad"):
            add_to_main_grad(self.weight, hidden, logits_gradient)
        else:
            self._total().add_(logits_gradient.t().matmul(hidden))

    def add_embedding_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of the embedding for one microbatch, token by token in fp32."""
        add_embedding_gradient(self._sum_of_embedding(), self.rows, tokens, gradient)

    def _sum_of_embedding(self) -> torch.Tensor:
        """Where the gradients of the embedding are added up.

        That is a buffer of its own for tied weights, because schedules interleave the gradients of embedding and output
        layer differently, and bits must not depend on that; also where `main_grad` has only 16 bits.
        """
        total = self._total()
        if self.num_uses == 1 and total.dtype is torch.float32:
            return total
        if self.embedding_sum is None:
            self.embedding_sum = torch.zeros_like(total, dtype=torch.promote_types(total.dtype, torch.float32))
        return self.embedding_sum

    def _total(self) -> torch.Tensor:
        if hasattr(self.weight, "main_grad"):
            return self.weight.main_grad
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        return self.weight.grad

    def complete(self) -> None:
        """Note that one use has added the gradients of all microbatches; after the last use tell DDP."""
        self._num_complete += 1
        if self._num_complete < self.num_uses:
            return
        if self.embedding_sum is not None:
            self._total().add_(self.embedding_sum)
        self.forget_gradient()
        if self._hook is not None:
            self.weight.grad_added_to_main_grad = True
            self.weight.grad = placeholder_gradient(self.weight)
            self._hook()

    def forget_gradient(self) -> None:
        """Begin a new step; what is in `main_grad` stays there."""
        self.embedding_sum, self._num_complete = None, 0
