"""Computes the embedding and the softmax of the output layer on one shard of the vocabulary, without communication.

The rows of the output layer's weight matrix W are divided into shards W_d. From the hidden states X of n tokens, a
shard computes:

    Y_d = X W_d^T,   m_d = rowmax(Y_d),   s_d = rowsum(exp(Y_d - m_d)),   P_d = exp(Y_d - m_d) / s_d

A shard also computes z_d: the label's logit if the label's row is in the shard, else -inf. From m_d, s_d and z_d of all
shards, every rank computes:

    M = max m_d,   S = sum s_d exp(m_d - M),   Z = max z_d,   loss l = log S + M - Z,   alpha_d = s_d exp(m_d - M) / S.

If no shard has the label (-100, for example), Z is M, as in megatron-core.

Let g = dLoss/dl be the gradient of the training loss with respect to the loss l of each token. Let G_d be 1 at the
label's row, if the shard has this row, and 0 at all other rows. The gradient of the hidden states X is

    dX = g sum_d (alpha_d P_d - G_d) W_d.

The gradient of the weights W_d of one shard is

    dW_d = (g (alpha_d P_d - G_d))^T X.

The computation is Algorithm 2 of the paper on vocabulary parallelism (arXiv 2411.05288). Both gradients contain the
difference alpha_d P_d - G_d. With D_d = P_d - G_d, this module computes the difference alpha_d P_d - G_d as

    alpha_d P_d - G_d = alpha_d D_d + (alpha_d - 1) G_d.

The product D_d W_d needs no data of other shards, and is computed before the shards exchange statistics. If the model
predicts a label with high probability, alpha_d P_d almost equals G_d. If alpha_d P_d almost equals G_d, rounding
alpha_d P_d to 16 bits would lose most of the difference alpha_d P_d - G_d. If the model predicts a label with high
probability, the two terms alpha_d D_d and (alpha_d - 1) G_d are small, so that rounding D_d to 16 bits loses little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.zero_bubble.mcore.weight_grad import add_to_main_grad, placeholder_gradient
from megatron.zero_bubble.runtime.collectives import sum_in_order

_SCALES = {torch.float16: 1024.0}
"""Type of the weights -> factor of D_d in `ShardSoftmax.difference`. Without the factor, most elements of D_d would be
below the smallest normal number of fp16."""


@dataclass(frozen=True)
class Rows:
    """The rows of one shard, as a range of token numbers in the vocabulary."""

    first: int
    count: int

    def locate(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return every token's row in this shard, and whether the token is in this shard.

        Tokens of other shards get rows that are spread over all rows of this shard. If the tokens of other shards had
        one row in common, a GPU would add the gradients of these tokens, which are zeros, to this row one by one.
        """
        row = tokens - self.first
        return torch.remainder(row, self.count), (row >= 0) & (row < self.count)


def statistics_type(weight: torch.Tensor) -> torch.dtype:
    """Return the type of softmax statistics and of sums over shards: fp32, unless the weights are more precise."""
    return torch.promote_types(weight.dtype, torch.float32)


@dataclass
class ShardSoftmax:
    """The softmax of n tokens on one shard. `difference`, `product` and `label_weights` are None in an evaluation.

    Attributes:
        statistics: [3, n], the maximum m_d, the sum s_d and the label's logit z_d (-inf if another shard has the
            label), in `statistics_type`.
        rows: [n], the label's row in this shard; arbitrary if another shard has the label.
        is_own: [n], whether the label is in this shard.
        difference: [n, rows of the shard], `scale` times D_d = P_d - G_d, in the type of the weights.
        product: [n, hidden], the product of `difference` and the weights; None once the input gradient is computed.
        label_weights: [n, hidden], the row of weights of each label, zeros if another shard has the label; None when
            `product` is None.
        scale: the factor of D_d in `difference`.
    """

    statistics: torch.Tensor
    rows: torch.Tensor
    is_own: torch.Tensor
    difference: torch.Tensor | None = None
    product: torch.Tensor | None = None
    label_weights: torch.Tensor | None = None
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors of this softmax; fields that are None count as 0 bytes."""
        tensors = (self.statistics, self.rows, self.is_own, self.difference, self.product, self.label_weights)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def take_input_gradient(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return this shard's term of the input gradient dX for a loss gradient of 1, [n, hidden] in `statistics_type`;
        drop `product` and `label_weights`."""
        assert self.product is not None
        assert self.label_weights is not None
        gradient = self.product.to(alpha.dtype).mul_((alpha / self.scale).unsqueeze(1))
        gradient += self.label_weights.to(alpha.dtype).mul_((alpha - 1).unsqueeze(1))
        self.product = self.label_weights = None
        return gradient

    def logits_gradient(self, alpha: torch.Tensor, loss_gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits, g (alpha_d P_d - G_d), [n, rows of the shard], in the type of the weights.

        Args:
            alpha: [n], this shard's share alpha_d of the softmax's sum, in `statistics_type`.
            loss_gradient: [n], the gradient g with respect to every token's loss, in `statistics_type`.
        """
        assert self.difference is not None
        gradient = self.difference.to(alpha.dtype) * (loss_gradient * alpha / self.scale).unsqueeze(1)
        at_labels = loss_gradient * (alpha - 1) * self.is_own
        gradient[torch.arange(len(self.rows), device=gradient.device), self.rows] += at_labels
        return gradient.to(self.difference.dtype)


def softmax(
    weight: torch.Tensor, rows: Rows, hidden: torch.Tensor, labels: torch.Tensor, *, with_gradients: bool = True
) -> ShardSoftmax:
    """Compute the softmax of a shard, and the values that the gradients of the softmax need.

    As in megatron-core, the logits are computed in the type of the weights and then converted to `statistics_type`.

    Args:
        weight: [rows of the shard, hidden].
        hidden: [n, hidden], the hidden states X in the type of the weights.
        labels: [n], the labels' token numbers.
    """
    local, is_own = rows.locate(labels)
    each = torch.arange(len(labels), device=labels.device)
    logits = (hidden @ weight.t()).to(statistics_type(weight))
    maximum = logits.amax(dim=1)
    label_logit = logits[each, local].masked_fill_(~is_own, -math.inf)
    exponentials = logits.sub_(maximum.unsqueeze(1)).exp_()
    total = exponentials.sum(dim=1)
    result = ShardSoftmax(torch.stack([maximum, total, label_logit]), local, is_own)
    if with_gradients:
        result.scale = _SCALES.get(weight.dtype, 1.0)
        difference = exponentials.div_(total.unsqueeze(1))
        difference[each, local] -= is_own.to(difference.dtype)
        result.difference = difference.mul_(result.scale).to(weight.dtype)
        result.product = result.difference @ weight
        result.label_weights = weight[local] * is_own.unsqueeze(1)
    return result


def combine(statistics: torch.Tensor, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of every token, and one shard's share alpha_d of the softmax's sum, each as an [n] tensor.

    Sums over shards are taken in the order of shards, so that all ranks get the same bits.

    Args:
        statistics: [shards, 3, n], `ShardSoftmax.statistics` of all shards.
    """
    maxima, totals, label_logits = statistics.unbind(dim=1)
    maximum = maxima.amax(dim=0)
    shares = totals * (maxima - maximum).exp()
    total = sum_in_order(shares, torch.empty_like(maximum))
    # As in megatron-core, the subtracted term is the label's logit minus the maximum, or 0 if no shard has the label.
    label_logit = label_logits.amax(dim=0)
    loss = total.log() - (label_logit - maximum).masked_fill_(label_logit.isneginf(), 0.0)
    return loss, shares[shard] / total


def look_up(weight: torch.Tensor, rows: Rows, tokens: torch.Tensor) -> torch.Tensor:
    """Return the embedding of every token in this shard, and zeros for other tokens: [*tokens.shape, hidden].

    The sum of all shards' embeddings of a token is exactly the whole embedding, because all terms but one are zeros.
    """
    local, is_own = rows.locate(tokens)
    return weight[local] * is_own.unsqueeze(-1)


def add_embedding_gradient(total: torch.Tensor, rows: Rows, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradient of every token's embedding to the token's row, if this shard has the row.

    The sums of embedding gradients are bitwise reproducible.

    Args:
        total: [rows of the shard, hidden], the sums of gradients, any floating type.
        gradient: [*tokens.shape, hidden], any floating type.
    """
    local, is_own = rows.locate(tokens.reshape(-1))
    own = gradient.reshape(-1, gradient.shape[-1]).to(total.dtype) * is_own.unsqueeze(1)
    # Unlike `index_add_`, this sum adds in a fixed order on a GPU, too.
    total.index_put_((local,), own, accumulate=True)


class ShardWeight(torch.nn.Module):
    """A module whose only parameter contains the rows of one vocabulary shard.

    Calling a `ShardWeight` returns the parameter and runs DDP's forward hooks. The gradient is added up in `main_grad`
    if DDP has created a `main_grad`, else in `weight.grad`. Once the gradients of all microbatches are added,
    `complete` calls DDP's hook, as W does (see `weight_grad.py`).

    Args:
        values: [rows, hidden], the weights, which are copied.
        rows: position of the rows in the vocabulary.
        attributes: attributes of megatron-core's parameter, which the new parameter takes over.
        num_uses: 2 for tied weights, which get gradients of the embedding and of the output layer, else 1.

    Attributes:
        embedding_sum: sum of the embedding's gradients, if `main_grad` does not contain this sum; None between steps.
    """

    def __init__(self, values: torch.Tensor, rows: Rows, attributes: Mapping[str, Any], num_uses: int) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(values.detach().clone())
        for name, value in attributes.items():
            setattr(weight, name, value)
        # Tells DDP that the gradient comes through the hook that DDP registers, not from autograd.
        weight.skip_backward_post_hook = True
        self.weight = weight
        self.rows, self.num_uses = rows, num_uses
        self.embedding_sum: torch.Tensor | None = None
        self._num_complete = 0
        self._hook: Callable[[], None] | None = None

    def forward(self) -> torch.Tensor:
        return self.weight

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Store the hook that DDP passes; the hook tells DDP that the gradient is ready."""
        self._hook = hook

    def add_output_gradient(self, logits_gradient: torch.Tensor, hidden: torch.Tensor, *, is_fused: bool) -> None:
        """Add one microbatch's gradient of the output layer to the sum of gradients.

        Args:
            logits_gradient: [n, rows].
            hidden: [n, hidden].
            is_fused: whether to add the weight gradient straight into `main_grad`, with apex's kernel.
        """
        if is_fused and hasattr(self.weight, "main_grad"):
            add_to_main_grad(self.weight, hidden, logits_gradient)
        else:
            self._total().add_(logits_gradient.t().matmul(hidden))

    def add_embedding_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add one microbatch's gradient of the embedding to the sum of gradients, token by token in fp32."""
        add_embedding_gradient(self._sum_of_embedding(), self.rows, tokens, gradient)

    def _sum_of_embedding(self) -> torch.Tensor:
        """Return the tensor in which the gradients of the embedding are added up.

        Tied weights have a separate buffer for embedding gradients. Schedules interleave gradients of embedding and
        output layer differently, so with a single buffer the sum's bits would depend on the schedule. Untied
        weights with a 16-bit `main_grad` also have a separate buffer for embedding gradients, in fp32.
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
        """Record that the embedding or the output layer has added all its gradients of this step.

        Once all layers that use the weight have added their gradients, `complete` calls DDP's hook.
        """
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
        """Drop the separate sum of embedding gradients before a new step, and leave `main_grad` unchanged."""
        self.embedding_sum, self._num_complete = None, 0
