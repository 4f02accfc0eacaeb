"""A batch is split along the first dimension of its tensors; everything else that has samples is refused."""

from __future__ import annotations

import re
from collections import UserDict
from dataclasses import dataclass

import numpy
import pytest
import torch
from rank_threads import errors_on_ranks, pipeline_of
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble.pipeline.batches import microbatches_of

CPU = torch.device("cpu")
X = torch.arange(8.0)[:, None]


def test_constants_are_the_same_in_every_microbatch():
    size, names = (2, 8), ["a", "b"]
    found = microbatches_of(((X, 3, size), {"targets": X, "names": names, "none": None}), 4, CPU)
    assert [inputs[1:] for inputs in found.inputs] == [(3, size)] * 4
    assert [targets["names"] for targets in found.targets] == [names] * 4
    assert torch.equal(torch.cat([inputs[0] for inputs in found.inputs]), X)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ((X, numpy.arange(8)), "ndarray of 8"),
        ((X, {"labels": list(range(8))}), "list of 8"),
        (({"x": X, "weights": [0.5] * 8}, X), "list of 8"),
        ((X, range(8)), "range of 8"),
        ((X, (X, tuple("abcdefgh"))), "tuple of 8"),
    ],
    ids=["array", "list", "inputs", "range", "strings"],
)
def test_samples_that_are_no_tensor_are_refused(batch, what):
    message = f"a batch contains a {what}, which is not split: give a tensor, or an iterator of microbatches"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        microbatches_of(batch, 4, CPU)


@dataclass
class Example:
    ids: object


@pytest.mark.parametrize("samples", [X, [0] * 8], ids=["tensor", "list"])
@pytest.mark.parametrize("kind", [Example, lambda samples: UserDict(ids=samples)], ids=["attribute", "mapping"])
def test_samples_inside_objects_that_are_not_split_are_refused(kind, samples):
    target = kind(samples)
    message = (
        f"a batch contains a {type(target).__name__}, which is not split: give a dict of its tensors, or an iterator "
        "of microbatches"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        microbatches_of((X, {"labels": target}), 4, CPU)


def test_objects_without_samples_are_the_same_in_every_microbatch():
    constants = UserDict(alpha=0.1, names=["a", "b"]), Example(torch.ones(3))
    assert [targets[1:] for targets in microbatches_of((X, (X, *constants)), 4, CPU).targets] == [constants] * 4


def test_an_iterator_may_yield_what_a_loss_understands():
    pairs = [(X[:2], [1, 2]), (X[2:4], [3, 4])]
    assert microbatches_of(iter(pairs), 2, CPU).targets == [[1, 2], [3, 4]]


def test_a_batch_that_cannot_be_moved_is_one_line_on_all_ranks():
    def train(interconnect):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4}
        pipeline = pipeline_of([nn.Linear(1, 1) for _ in range(2)], mse_loss, interconnect, **arguments)
        pipeline.train_batch((X.to("meta"), X))

    errors = errors_on_ranks(2, train)
    assert [type(error) for error in errors] == [ValueError] * 2
    assert all(str(error).startswith("the batch cannot be used: NotImplementedError: ") for error in errors), errors
