"""Checkpointed layers of a pipeline run again before their backward and get the same gradients."""

from __future__ import annotations

import pytest
import torch
from rank_threads import errors_on_ranks, gradients_of, merged, pipeline_of, pipelines, run_in_one_process
from small_layers import WIDTH, assert_equal, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.zero_bubble import LayerSpec
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_checkpointed_layers_run_again_in_r_and_give_the_same_gradients(schedule, monkeypatch):
    layers, batch = stack(4)
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)
    recomputed = []
    recompute = RecomputationStore.recompute

    def count(store, chunk, microbatch):
        recomputed.append((chunk, microbatch))
        recompute(store, chunk, microbatch)

    monkeypatch.setattr(RecomputationStore, "recompute", count)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": schedule, "num_microbatches": 4, "checkpoint": True}
    assert_equal(merged(pipelines(2, layers, nn.functional.mse_loss, train, **arguments)), gradients_of(model))
    assert len(recomputed) >= 4


class Block(nn.Module):
    """Repeats its forward in the backward, as models with gradient checkpointing do, and counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*stack(3)[0])
        self.num_forwards = 0

    def _run(self, x):
        self.num_forwards += 1
        return self.inner(x)

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=False)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_torchs_checkpoint_repeats_a_forward_once_and_w_stays_in_b(schedule):
    layers, batch = [Block(), *stack(1)[0]], stack(1)[1]
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)

    def train(pipeline):
        pipeline.train_batch(batch)  # the first batch has one more forward, which discovers messages
        counts = [block.num_forwards for block in pipeline.modules() if isinstance(block, Block)]
        pipeline.zero_grad()
        assert torch.equal(pipeline.train_batch(batch), loss)
        counts += [block.num_forwards - counts[0] for block in pipeline.modules() if isinstance(block, Block)]
        return {"counts": counts, **gradients_of(pipeline)}

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": [1]}
    with pytest.warns(UserWarning, match="W stays in B inside torch.utils.checkpoint"):
        parts = pipelines(2, layers, nn.functional.mse_loss, train, **arguments)
    assert [part.pop("counts") for part in parts] == [[9, 8], []]
    assert_equal(merged(parts), gradients_of(model))


class Watched(nn.Module):
    """Hooks its input, and returns a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.seen.append)
        return x.view_as(x)


def test_checkpointed_layers_may_return_views_of_their_inputs():
    layers, batch = stack(2)
    watched = Watched()
    layers[1:1] = [nn.Unflatten(1, (2, 3)), nn.Identity(), nn.Flatten(), watched, nn.Flatten()]
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        seen = [module.seen for module in pipeline.modules() if isinstance(module, Watched)]
        return {"seen": seen, **gradients_of(pipeline)}

    for partition in ([2], [3], [7]):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": partition, "checkpoint": True}
        parts = pipelines(2, layers, nn.functional.mse_loss, train, **arguments)
        (seen,) = [seen for part in parts for seen in part.pop("seen")]
        assert len(seen) == 4, "the hook ran once for each microbatch"
        assert_equal(merged(parts), {**dict.fromkeys(merged(parts)), **gradients_of(model)})


class WithMask(nn.Module):
    """Computes with a mask and passes the mask on; NumPy refuses a mask that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack(1)[0][0]

    def forward(self, value):
        x, mask = value
        return self.inner(x * torch.from_numpy(mask.numpy())), mask


class MakesMask(nn.Module):
    """Computes a mask beside its output, as the first layer of a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack(1)[0][0]

    def forward(self, value):
        x, _ = value
        return self.inner(x), (x > 0).float()


@pytest.mark.parametrize("first", [WithMask, MakesMask])
@pytest.mark.parametrize("partition", [[1], [2], [4]])
def test_a_mask_needs_no_gradient_behind_a_checkpointed_layer(first, partition):
    _, (x, target) = stack(1)
    batch = (x, (torch.arange(x.numel()) % 3).view_as(x).float()), target
    layers = [first(), WithMask(), WithMask(), lambda value: value[0], *stack(1)[0]]

    def train(checkpoint: bool) -> dict[str, torch.Tensor]:
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": partition, "checkpoint": checkpoint}
        steps = lambda pipeline: (pipeline.train_batch(batch), gradients_of(pipeline))[1]  # noqa: E731
        return merged(pipelines(2, layers, nn.functional.mse_loss, steps, **arguments))

    assert_equal(train(True), train(False))


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (stack(1)[0][0] for _ in range(2))

    def forward(self, x):
        return self.left(x), self.right(x)


def test_parts_of_a_checkpointed_layer_may_be_frozen_and_thawed():
    layers, batch = [Twofold(), lambda pair: pair[0] * pair[1], *stack(1)[0]], stack(1)[1]

    def train(checkpoint: bool) -> dict[str, torch.Tensor]:
        def steps(pipeline):
            for thaws in (True, False, True):
                for name, parameter in pipeline.named_parameters():
                    parameter.requires_grad_(thaws or "left" not in name)
                pipeline.train_batch(batch)
            return gradients_of(pipeline)

        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": [2], "checkpoint": checkpoint}
        return merged(pipelines(2, layers, nn.functional.mse_loss, steps, **arguments))

    assert_equal(train(True), train(False))


def test_a_checkpointed_layer_draws_the_same_random_numbers_twice():
    layers, batch = stack(4)
    layers.insert(1, nn.Dropout(0.5))  # on the first rank alone: the threads of a test share one generator

    def train(checkpoint: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform", "checkpoint": checkpoint}
        steps = lambda pipeline: (pipeline.train_batch(batch), gradients_of(pipeline))[1]  # noqa: E731
        return merged(pipelines(2, layers, nn.functional.mse_loss, steps, **arguments))

    assert_equal(train(True), train(False))


class Queries(nn.Module):
    """Returns a part of a parameter beside its input, as models with learned queries do."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.queries, self.learns = nn.Parameter(torch.randn(4, 3)), learns

    def forward(self, x):
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            return x, self.queries[:1]


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair):
        x, queries = pair
        return self.linear(x) + queries


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"checkpoint": True}])
def test_a_part_of_a_parameter_may_pass_between_stages_with_and_without_a_gradient(learns, arguments):
    batch = torch.randn(8, 3), torch.randn(8, 3)
    layers = [Queries(learns=learns), Attend()]
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        assert torch.equal(pipeline.eval_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": [1], **arguments}
    assert_equal(merged(pipelines(2, layers, nn.functional.mse_loss, train, **arguments)), gradients_of(model))


class PassesOn(nn.Module):
    def forward(self, x):
        return x, x.exp()  # whose backward needs the result only


class ChangesInPlace(nn.Module):
    def forward(self, pair):
        return pair[0].add_(1) * pair[1]


def test_an_input_that_a_later_layer_changes_cannot_be_recomputed_from():
    layers = [nn.Linear(WIDTH, WIDTH), LayerSpec(PassesOn, checkpoint=True), ChangesInPlace(), nn.Linear(WIDTH, WIDTH)]
    batch = stack(2)[1]

    def train(interconnect):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": [3]}
        pipeline_of(layers, nn.functional.mse_loss, interconnect, **arguments).train_batch(batch)

    for error in errors_on_ranks(2, train):
        assert "a later layer has changed the input of a checkpointed layer in place: change a copy" in str(error)
