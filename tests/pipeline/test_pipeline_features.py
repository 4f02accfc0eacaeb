"""Messages of several tensors, tied and checkpointed layers, clipping, autocast and evaluation in a pipeline."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from rank_threads import accumulate, gradients_of, merged, pipelines, run_in_one_process
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.zero_bubble import TiedLayerSpec
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore

WIDTH = 6


def assert_equal(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        assert (value is None) == (ours[name] is None), name
        assert value is None or torch.equal(ours[name], value), name


def stack(count: int) -> tuple[list[nn.Module], tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    layers = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return layers, (torch.randn(8, WIDTH), torch.randn(8, WIDTH))


class Branches(nn.Module):
    """Makes a dict with a tuple, integers, a tensor without a gradient, one that nobody uses, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        tensors = {"order": x.argsort(), "mask": (x > 0).float(), "unused": x * 2}
        return {"pair": (self.left(x), self.right(x)), **tensors, "no": None, "nan": float("nan")}


class Mixed(nn.Module):
    """Hands a part of its input on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts):
        left, right = parts["pair"]
        left = self.inner(left.gather(1, parts["order"])) * parts["mask"]
        return {**parts, "pair": (left, right), "unused": 1.5}


class Joined(nn.Module):
    def forward(self, parts):
        left, right = parts["pair"]
        return left * right.sum(1, keepdim=True) + (0 if parts["no"] is None and math.isnan(parts["nan"]) else 1)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-zb"])
def test_stages_exchange_tuples_and_dicts(schedule, checkpoint):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Branches(), Mixed(), Mixed(), Joined(), nn.Linear(WIDTH, WIDTH)]
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform", "checkpoint": checkpoint}
    parts = pipelines(2, layers, nn.functional.mse_loss, train, **arguments)
    assert_equal(merged(parts), gradients_of(model))


class Skipped(nn.Module):
    """Skips its layer for inputs below zero, as LayerDrop does at random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_first_microbatch_may_skip_all_trained_layers_of_a_stage(checkpoint):
    layers, (x, y) = stack(2)
    layers, batch = [Skipped(), *layers], (torch.cat([-x[:4].abs(), x[4:].abs()]), y)
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": [1], "checkpoint": checkpoint}
    assert_equal(merged(pipelines(2, layers, nn.functional.mse_loss, train, **arguments)), gradients_of(model))


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


def times_weight(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


@pytest.mark.parametrize(("schedule", "assign"), [("zb-h1", False), ("zb-h1", True), ("zb-v", False)])
def test_tied_layers_get_the_sum_of_their_copies_gradients(schedule, assign):
    """Over two ranks, or on one rank twice, where the V has its first and its last stage."""

    class Table(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(7, WIDTH)
            with torch.no_grad():
                self.weight.copy_(torch.arange(7 * WIDTH).view(7, WIDTH).sin())

    layers, _ = stack(2)
    layers = [TiedLayerSpec("table", Table), *layers, TiedLayerSpec("table", Table, forward=times_weight)]
    batch = torch.randint(7, (8,)), torch.randint(7, (8,))
    first, last = Table(), Table()
    model = nn.Sequential(first, *copy.deepcopy(layers[1:-1]))
    for _ in range(2):
        accumulate(lambda x: times_weight(last, model(x)), nn.functional.cross_entropy, batch, 4)
    # The copies' gradients of every step are added before those of the next step are.
    expected = gradients_of(model)
    del expected["0.weight"]
    one_step = (first.weight.grad + last.weight.grad) / 2
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in (2 * one_step, *expected.values())]))

    def train(pipeline):
        pipeline.load_state_dict(pipeline.state_dict(), assign=assign)
        for _ in range(2):
            pipeline.train_batch(batch)
        grads = gradients_of(pipeline)
        assert torch.allclose(pipeline.clip_grad_norm_(1e9), norm)
        return grads

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform"}
    found = merged(pipelines(2, layers, nn.functional.cross_entropy, train, **arguments))
    assert torch.equal(found["0.weight"], found["5.weight"])
    assert torch.allclose(found["0.weight"], 2 * one_step, atol=1e-6)
    assert_equal({name: grad for name, grad in found.items() if name in expected}, expected)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_tied_parameter_gets_a_gradient_only_if_one_of_its_copies_has_one(schedule):
    """Otherwise an optimizer would decay it. Freezing it keeps its gradient of earlier steps."""
    layers, batch = stack(2)
    forwards = (times_weight, lambda module, x: x)
    ends = [TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH, forward=forward) for forward in forwards]
    layers = [ends[0], *layers, ends[1]]

    def train(pipeline):
        gradients = []
        for thaw in (True, False, True):
            weights = [weight for name, weight in pipeline.named_parameters() if name in ("0.weight", "5.weight")]
            for weight in weights:
                weight.requires_grad_(thaw)
            pipeline.train_batch(batch)
            gradients += [[weight.grad.clone() for weight in weights]]
        biases = [grad for name, grad in gradients_of(pipeline).items() if name in ("0.bias", "5.bias")]
        assert biases == [None] * len(weights)
        return gradients

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform"}
    steps = zip(*pipelines(2, layers, nn.functional.mse_loss, train, **arguments), strict=True)
    (expected, *of_first), *others = ([grad for part in parts for grad in part] for parts in steps)
    assert expected.any()
    for times, gradients in zip((1, 1, 2), (of_first, *others), strict=True):
        assert all(torch.equal(grad, times * expected) for grad in gradients)


def test_the_state_of_layers_that_are_tied_on_one_stage_can_be_loaded():
    layers = [
        TiedLayerSpec("both", nn.Linear, WIDTH, WIDTH),
        *stack(1)[0],
        TiedLayerSpec("both", nn.Linear, WIDTH, WIDTH),
    ]
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    other = {f"{index}.{name}": torch.rand(shape) for index in (0, 1, 3) for name, shape in shapes.items()}
    other.update({f"3.{name}": other[f"0.{name}"] for name in shapes})

    def load(pipeline):
        pipeline.load_state_dict(other)
        return pipeline.full_state_dict()

    for partition in ([4], [1]):
        for state in pipelines(
            2, [*layers, nn.Tanh()], nn.functional.mse_loss, load, schedule="1f1b", partition=partition
        ):
            assert_equal(state, other)


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


def test_a_checkpointed_layer_draws_the_same_random_numbers_twice():
    layers, batch = stack(4)
    layers.insert(1, nn.Dropout(0.5))  # on the first rank alone: the threads of a test share one generator

    def train(checkpoint: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform", "checkpoint": checkpoint}
        steps = lambda pipeline: (pipeline.train_batch(batch), gradients_of(pipeline))[1]  # noqa: E731
        return merged(pipelines(2, layers, nn.functional.mse_loss, steps, **arguments))

    assert_equal(train(True), train(False))


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


def test_what_keeps_its_w_in_b_is_listed_with_its_share_at_start_and_in_the_summary(caplog):
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.ReLU()]
    with caplog.at_level(logging.WARNING, logger="megatron.zero_bubble"):
        (first, second) = pipelines(
            2, layers, nn.functional.mse_loss, lambda pipeline: pipeline.summary(), schedule="zb-h1", partition=[1]
        )
    assert first == second
    notice = "Pipeline: W stays in B for BatchNorm1d (20.0% of the parameters); split_layers=[...] splits more"
    assert caplog.messages == [notice]  # from one rank alone
    assert "stage 1 on rank 1: layers 1 to 3, 3 layers" in first
    assert "W is split off for 80.0% of the parameters" in first
    assert "W stays in B: BatchNorm1d, 20.0% of the parameters" in first


@pytest.mark.parametrize("partition", ["parameters", "type:linear", "profile"])
def test_partitions_give_every_stage_layers(partition):
    layers, batch = stack(4)
    example = batch[0][:2], batch[1][:2]
    arguments = {"schedule": "zb-1p", "num_microbatches": 4, "partition": partition, "example": example}

    def use(pipeline):
        pipeline.train_batch(batch)
        return pipeline.layout

    first, second = pipelines(2, layers, nn.functional.mse_loss, use, **arguments)
    assert first == second
    if partition != "profile":
        assert first.loads[0] == first.loads[1]
    else:
        assert first.unit == "s a microbatch"
        assert all(load > 0 for load in first.loads)


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


def test_the_time_of_every_stage_is_measured():
    layers, batch = stack(4)
    arguments = {"schedule": "zb-v", "num_microbatches": 4, "partition": "uniform"}
    use = lambda pipeline: (pipeline.stage_times(batch), gradients_of(pipeline))  # noqa: E731
    (first, _), (second, grads) = pipelines(2, layers, nn.functional.mse_loss, use, **arguments)
    assert first == second
    assert len(first) == 4
    assert all(time > 0 for stage in first for time in stage)
    assert all(grad is not None for grad in grads.values())


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
