"""Spreads the vocabulary before a script computes where DDP's buffers have each parameter.

From megatron-core 0.18 on, the script computes this layout for the distributed optimizer and gives it to DDP, whose
parameters must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.zero_bubble.launcher.hooks import Call


def shard_before_layout(call: Call, chunks: Sequence[torch.nn.Module], shard: Callable[[], None]) -> None:
    """Shard the vocabulary of a model, and let a call of `compute_full_param_layout` lay out the new parameters.

    Args:
        call: the call, with the trainable parameters of one chunk; unchanged if no chunk of the model has them.
        chunks: the model's chunks on this rank.
        shard: shards the vocabulary of `chunks`; a collective call of the pipeline's ranks.
    """
    given = [id(parameter) for parameter in call["params"]]
    chunk = next((chunk for chunk in chunks if [id(parameter) for parameter in _trainable(chunk)] == given), None)
    if chunk is not None:
        shard()
        call["params"] = _trainable(chunk)


def _trainable(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in chunk.parameters() if parameter.requires_grad]
