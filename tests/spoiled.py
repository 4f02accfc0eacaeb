"""Values that are not finite, put into a training that runs in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"
"""The parameter that is spoiled, in the chunk whose forward step runs."""


def spoil(what: str, model: Any, output: torch.Tensor) -> torch.Tensor:
    """Make `what` of the model not finite, during one of its forward steps; returns what the step then gives."""
    if what == "unused":  # the row of a token that the data does not have
        unwrap_model(model).embedding.word_embeddings.weight.data[-1, 5] = float("nan")
        return output
    parameter = unwrap_model(model).get_parameter(WEIGHT)
    if what == "weight":
        parameter.data.view(-1)[5] = float("nan")
    elif what == "gradient":
        parameter.main_grad.view(-1)[5] = float("inf")
    elif what == "output":
        return output + float("inf")
    return output


@contextlib.contextmanager
def spoiled(places: Sequence[str]) -> Iterator[None]:
    """`WHAT@RANK@CALL`: spoil it on this global rank in its CALL-th forward step, counted from 1."""
    from megatron.zero_bubble.training import loop

    make_forward_step, calls = loop.make_forward_step, count(1)

    def make_spoiled(*args: Any, **options: Any) -> Any:
        forward_step = make_forward_step(*args, **options)

        def spoiled_step(data_iterator: Any, model: Any) -> Any:
            output, loss_func = forward_step(data_iterator, model)
            call = next(calls)
            for place in places:
                what, rank, number = place.split("@")
                if (int(rank), int(number)) == (dist.get_rank(), call):
                    output = spoil(what, model, output)
            return output, loss_func

        return spoiled_step

    with mock.patch.object(loop, "make_forward_step", make_spoiled):
        yield
