"""Clipping, autocast, frozen layers, hooks and evaluation give a pipeline the numbers of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_threads import accumulate, gradients_of, merged, pipelines, run_in_one_process
from small_layers import WIDTH, assert_equal, stack
from torch import nn


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_parameters_are_equal_after_ten_steps_with_clipping(schedule):
    layers, batch = stack(4)
    model = nn.Sequential(*copy.deepcopy(layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    norms = []
    for _ in range(10):
        accumulate(model, nn.functional.mse_loss, batch, 4)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    assert norms[0] > 0.05, "nothing was clipped"

    def train(pipeline):
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.05)
        for norm in norms:
            pipeline.train_batch(batch)
            assert torch.equal(pipeline.clip_grad_norm_(0.05), norm)
            optimizer.step()
            optimizer.zero_grad()
        return pipeline.full_state_dict()

    for whole in pipelines(2, layers, nn.functional.mse_loss, train, schedule=schedule, num_microbatches=4):
        assert list(whole) == list(model.state_dict())
        assert_equal(whole, model.state_dict())


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return x + self.weight.sum()


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_sparse_and_empty_gradients_have_norms(norm_type):
    layers, (_, y) = stack(2)
    table = nn.Embedding(5, WIDTH)
    table.weight.data.mul_(3)
    batch = torch.arange(8) % 5, y
    model, _ = run_in_one_process([table, *layers], nn.functional.mse_loss, batch, 4)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type)

    def train(pipeline):
        pipeline.train_batch(batch)
        return pipeline.clip_grad_norm_(1e-3, norm_type), gradients_of(pipeline)

    sparse = nn.Embedding.from_pretrained(table.weight.detach(), freeze=False, sparse=True)
    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform"}
    for norm, grads in pipelines(2, [sparse, Empty(), *layers], nn.functional.mse_loss, train, **arguments):
        torch.testing.assert_close(norm, expected)
        if "0.weight" in grads:
            torch.testing.assert_close(grads["0.weight"].to_dense(), model[0].weight.grad)


class InFloat32(nn.Module):
    """A product in full precision: its backward is, too, unless it runs under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


def test_autocast_covers_forwards_alone():
    layers, batch = stack(3)
    layers.insert(3, InFloat32())
    layers.insert(3, nn.LayerNorm(WIDTH))
    model = nn.Sequential(*copy.deepcopy(layers))
    losses = []
    for x, y in zip(*(values.chunk(4) for values in batch), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
        losses.append(loss.detach())

    for recomputes in (False, True):

        def train(pipeline):
            with torch.autocast("cpu", torch.bfloat16):
                pipeline.eval_batch(batch)
                assert torch.equal(pipeline.train_batch(batch), sum(losses[1:], start=losses[0]))
            return gradients_of(pipeline)

        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "checkpoint": recomputes}
        assert_equal(merged(pipelines(2, layers, nn.functional.mse_loss, train, **arguments)), gradients_of(model))


def test_evaluation_leaves_no_trace_and_sizes_may_change_between_steps():
    layers, batch = stack(2)
    layers.insert(2, nn.BatchNorm1d(WIDTH))
    model = nn.Sequential(*copy.deepcopy(layers)).eval()
    whole = [nn.functional.mse_loss(model(x), y) / 4 for x, y in zip(*(v.chunk(4) for v in batch), strict=True)]
    small = tuple(values[:4] for values in batch)

    def use(pipeline):
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        loss = pipeline.eval_batch(batch)
        assert torch.equal(loss, sum(whole[1:], start=whole[0]).detach())
        assert pipeline.training
        assert_equal(before, pipeline.state_dict())
        assert all(grad is None for grad in gradients_of(pipeline).values())
        pairs = zip(*(values.chunk(4) for values in small), strict=True)
        assert torch.equal(pipeline.eval_batch(small), pipeline.eval_batch(iter(list(pairs))))

    pipelines(2, layers, nn.functional.mse_loss, use, schedule="zb-v", num_microbatches=4, partition="uniform")


class Merged(nn.Linear):
    """Merges an adapter into its weight in evaluation, and takes it out again in training, as loralib's layers do."""

    is_merged = False

    def train(self, mode=True):
        if self.is_merged == mode:
            self.weight.data *= 0.5 if mode else 2
            self.is_merged = not mode
        return super().train(mode)


def test_evaluation_calls_the_train_of_a_layer_on_both_ways():
    layers, batch = [Merged(WIDTH, WIDTH), Merged(WIDTH, WIDTH).eval()], stack(2)[1]

    def use(pipeline):
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        modes = [module.training for module in pipeline.modules()]
        pipeline.eval_batch(batch)
        assert_equal(before, pipeline.state_dict())
        assert [module.training for module in pipeline.modules()] == modes

    pipelines(2, layers, nn.functional.mse_loss, use, schedule="zb-h1", num_microbatches=4, partition=[1])


def test_the_type_of_the_parameters_may_change_between_evaluations():
    layers = [nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)]
    batch = torch.arange(8), torch.randn(8, WIDTH)

    def use(pipeline):
        first = pipeline.eval_batch(batch)
        pipeline.double()
        assert pipeline.eval_batch((batch[0], batch[1].double())).dtype is torch.float64
        pipeline.float()
        assert torch.equal(pipeline.eval_batch(batch), first)

    pipelines(2, layers, nn.functional.mse_loss, use, schedule="zb-h1", num_microbatches=4, partition=[1])


def test_layers_may_be_frozen_and_thawed_between_steps():
    layers, batch = stack(2)
    model = nn.Sequential(*copy.deepcopy(layers))

    def freeze(module: nn.Module, *, thaw: bool) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(thaw or not name.startswith("0."))

    def train(module: nn.Module, step):
        for thaw in (False, True, False):
            freeze(module, thaw=thaw)
            step()
        return gradients_of(module)

    expected = train(model, lambda: accumulate(model, nn.functional.mse_loss, batch, 4))
    found = pipelines(
        2,
        layers,
        nn.functional.mse_loss,
        lambda pipeline: train(pipeline, lambda: pipeline.train_batch(batch)),
        schedule="zb-h1",
        num_microbatches=4,
    )
    assert_equal(merged(found), expected)


def test_inputs_and_weights_may_be_channels_last():
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    layers = [layer.to(memory_format=torch.channels_last) for layer in layers] + [nn.Flatten(), nn.Linear(8 * 36, 4)]
    batch = torch.randn(8, 3, 6, 6).to(memory_format=torch.channels_last), torch.randint(4, (8,))
    model, loss = run_in_one_process(layers, nn.functional.cross_entropy, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform"}
    grads = merged(pipelines(2, layers, nn.functional.cross_entropy, train, **arguments))
    assert_equal(grads, gradients_of(model))
    assert grads["0.weight"].is_contiguous(memory_format=torch.channels_last)


def test_a_rank_without_parameters_has_an_optimizer_as_the_others():
    layers, (x, y) = [nn.Linear(WIDTH, WIDTH), torch.relu], stack(1)[1]

    def use(pipeline):
        optimizer = torch.optim.AdamW(pipeline.parameters())
        outcome = pipeline.train_step((x, y), optimizer, 1.0)
        return outcome.loss, len(pipeline.own_parameters()), list(pipeline.state_dict())

    first, second = pipelines(
        2, layers, nn.functional.mse_loss, use, schedule="zb-h1", num_microbatches=4, partition="uniform"
    )
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((2, ["0.weight", "0.bias"]), (0, []))


def test_a_hook_of_a_weight_gets_its_gradients_as_in_one_process():
    layers, batch = stack(2)
    seen: list[torch.Tensor] = []

    def use(pipeline):
        if (weight := dict(pipeline.named_parameters()).get("0.weight")) is not None:
            weight.register_hook(seen.append)
        pipeline.train_batch(batch)
        return gradients_of(pipeline)

    ours = merged(pipelines(2, layers, nn.functional.mse_loss, use, schedule="zb-h1", num_microbatches=4))
    model, _ = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)
    assert_equal(ours, gradients_of(model))
    assert len(seen) == 4
    assert torch.equal(sum(seen[1:], start=seen[0]), ours["0.weight"])


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_trains_a_pipeline_if_the_optimizer_calls_it_once(optimizer_class):
    """LBFGS searches along the parameters of its rank, and ranks would call `train_batch` unequally often."""
    inputs = torch.randn(8, WIDTH)

    def run(pipeline):
        optimizer = optimizer_class(pipeline.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            return pipeline.train_batch((inputs, inputs))

        if optimizer_class is torch.optim.SGD:
            return float(optimizer.step(closure)) > float(optimizer.step(closure))
        with pytest.raises(ValueError, match=r"^a pipeline cannot train inside the step of LBFGS, "):
            optimizer.step(closure)
        return True

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    assert pipelines(2, layers, nn.functional.mse_loss, run, schedule="zb-h1", num_microbatches=4) == [True, True]
