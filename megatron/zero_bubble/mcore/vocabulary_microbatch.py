"""The intermediate results of one microbatch, which operations on a vocabulary shard pass to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.zero_bubble.mcore.recorded_call import RecordedCall
from megatron.zero_bubble.mcore.vocabulary_shard import ShardSoftmax
from megatron.zero_bubble.schedule import OpKind


@dataclass
class Microbatch:
    """The intermediate results of one microbatch that operations on a vocabulary shard pass to each other.

    In shapes, n is the number of tokens, batch times sequence; the tokens are in the order [sequence, batch].
    """

    outgoing: dict[OpKind, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Kind of collective -> tensors that this rank broadcasts. `outgoing` keeps the tensors until the broadcast
    runs, because this rank's operations may drop their own references to the tensors earlier."""
    call: RecordedCall | None = None
    """The first stage's call of the model, which the embedding E records before F runs; None once F runs."""
    loss_function: Callable[..., Any] | None = None
    tokens: torch.Tensor | None = None
    """Token numbers, [batch, sequence]."""
    looked_up: torch.Tensor | None = None
    """Embeddings that were looked up in this shard, [batch, sequence, hidden]. On the first stage's rank, the
    collective `OpKind.EMBEDDED` replaces the embeddings by the sum of all pipeline ranks' embeddings."""
    embedding_gradient: torch.Tensor | None = None
    """Gradient with respect to the embedded tokens of the first stage, [batch, sequence, hidden]."""
    hidden: torch.Tensor | None = None
    """Output of the last stage, [sequence, batch, hidden]; with sequence parallelism, a part of the sequence."""
    labels: torch.Tensor | None = None
    """Token numbers of the labels, [batch, sequence]."""
    softmax: ShardSoftmax | None = None
    losses: torch.Tensor | None = None
    """Loss of every token, [n]."""
    alpha: torch.Tensor | None = None
    """Share of this rank's vocabulary shard in the denominator of each token's softmax, [n]."""
    input_gradient: torch.Tensor | None = None
    """Gradient of the sum of all tokens' losses with respect to the last stage's output, [n, hidden]; only on the last
    stage's rank."""
    loss_gradient: torch.Tensor | None = None
    """Gradient of the training loss with respect to the loss of every token, [n]."""


class KeptGradient(torch.autograd.Function):
    """Returns embeddings unchanged in the forward; keeps the embeddings' gradient in the backward, for EW."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, looked_up: torch.Tensor, state: Microbatch) -> torch.Tensor:
        ctx.state = state
        return looked_up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.state.embedding_gradient = gradient = gradient.contiguous()
        ctx.state.outgoing[OpKind.EMBEDDED_GRAD] = (gradient,)
        return None, None, None
