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
    """Intermediate results of one microbatch that operations pass to each other. A size n is the number of tokens,
    batch times sequence, in the order [sequence, batch]."""

    outgoing: dict[OpKind, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Kind of collective -> tensors that this rank broadcasts, until the lane sends them. The operations of this rank
    may have forgotten the tensors by then."""
    call: RecordedCall | None = None
    """The call of the model in the first stage, until the stage's forward runs."""
    loss_function: Callable[..., Any] | None = None
    tokens: torch.Tensor | None = None
    """Token numbers, [batch, sequence]."""
    looked_up: torch.Tensor | None = None
    """[batch, sequence, hidden]: this shard's embeddings; on the first rank, after EMBEDDED, their sum over the
    pipeline."""
    embedding_gradient: torch.Tensor | None = None
    """Gradient of the first stage's embedding, [batch, sequence, hidden]."""
    hidden: torch.Tensor | None = None
    """[sequence, batch, hidden]: output of the last stage; with sequence parallelism a part of the sequence."""
    labels: torch.Tensor | None = None
    """Token numbers of the labels, [batch, sequence]."""
    softmax: ShardSoftmax | None = None
    losses: torch.Tensor | None = None
    """Loss of every token, [n]."""
    alpha: torch.Tensor | None = None
    """Share of this shard in the softmax's sum of every token, [n]."""
    input_gradient: torch.Tensor | None = None
    """[n, hidden], on the last rank: gradient of the last stage's output for a loss gradient of 1."""
    loss_gradient: torch.Tensor | None = None
    """Gradient with respect to the loss of every token, [n]."""


class KeptGradient(torch.autograd.Function):
    """Passes the embedding on, and keeps its gradient for EW. The embedding itself need not be kept until B."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, looked_up: torch.Tensor, state: Microbatch) -> torch.Tensor:
        ctx.state = state
        return looked_up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.state.embedding_gradient = gradient = gradient.contiguous()
        ctx.state.outgoing[OpKind.EMBEDDED_GRAD] = (gradient,)
        return None, None, None
