"""The values that a layer returns reach the next stage under their names, or all ranks refuse them in one line."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from rank_threads import errors_on_ranks, gradients_of, merged, pipeline_of, pipelines, run_in_one_process
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble.pipeline.messages import StageMessage

WIDTH = 4


class Swaps(nn.Module):
    """Returns a dict whose keys have another order if the sum of the inputs is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        inner = {"left": self.left(x), "constant": 3, "fixed": x.detach()}
        pairs = [("inner", inner), ("right", self.right(x))]
        if x.sum() > 0:
            pairs = [("right", pairs[1][1]), ("inner", dict(reversed(inner.items())))]
        return dict(pairs)


class Combines(nn.Module):
    def forward(self, given):
        inner = given["inner"]
        return inner["left"] - inner["constant"] * given["right"] + 2 * inner["fixed"]


@pytest.mark.parametrize("variable_shapes", [False, True])
def test_keys_in_another_order_keep_their_tensors(variable_shapes):
    torch.manual_seed(1)
    layers = [Swaps(), Combines(), nn.Linear(WIDTH, WIDTH)]
    batch = torch.tensor([-1.0, 1, 2, -2]).repeat_interleave(2)[:, None] * torch.rand(8, WIDTH), torch.ones(8, WIDTH)
    model, loss = run_in_one_process(layers, mse_loss, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": [1], "variable_shapes": variable_shapes}
    found = merged(pipelines(2, layers, mse_loss, train, **arguments))
    for name, grad in gradients_of(model).items():
        assert torch.equal(found[name], grad), name


def test_a_class_that_other_ranks_cannot_import_is_refused():
    local = namedtuple("local", "first second")

    class Returns(nn.Linear):
        def forward(self, x):
            return local(super().forward(x), x)

    def train(interconnect):
        layers = [Returns(WIDTH, WIDTH), Combines()]
        arguments = {"schedule": "zb-h1", "num_microbatches": 4}
        pipeline_of(layers, mse_loss, interconnect, **arguments).train_batch((torch.ones(8, WIDTH),) * 2)

    errors = errors_on_ranks(2, train)
    assert [type(error) for error in errors] == [ValueError] * 2
    for error in errors:
        assert str(error).startswith("rank 0 cannot describe its part to the other ranks: ")
        assert str(error).endswith(": a class must be defined at the top of a module")
        assert "local" in str(error)


def test_a_tensor_on_the_cpu_is_refused_between_stages_on_gpus():
    """For example an auxiliary loss that begins as `torch.zeros(())`."""
    with pytest.raises(ValueError, match="a tensor on cpu cannot be sent to the next stage: move it to cuda:0"):
        StageMessage.to_send((torch.zeros(3), torch.zeros(())), torch.device("cuda", 0))
