"""Starts pipelines that cannot work, and compares the errors of all ranks with one message."""

from __future__ import annotations

import torch
from rank_threads import errors_on_ranks, pipeline_of
from torch import nn

X, Y = torch.ones(8, 4), torch.ones(8, 4)


def linears(count: int) -> list:
    return [nn.Linear(4, 4) for _ in range(count)]


def assert_message(layers, message, batch=(X, Y), loss_fn=nn.functional.mse_loss, **arguments):
    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform", **arguments}

    def run(interconnect):
        pipeline_of(layers, loss_fn, interconnect, **arguments).train_batch(
            iter(batch) if isinstance(batch, list) else batch
        )

    errors = errors_on_ranks(2, run)
    assert all(isinstance(error, ValueError) for error in errors), errors
    found = {str(error) for error in errors}
    assert found == {message}, found
