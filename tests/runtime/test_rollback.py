"""Undoing a step: of torch's optimizers, of one that counts as apex's and Transformer Engine's, of one that is odd."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron.zero_bubble.runtime.rollback import Inverse, Snapshot, make_rollback

SHAPES = [(64, 32), (64,), (7, 5, 3)]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


class FusedAdam(torch.optim.Optimizer):
    """A stand-in for the Adam of apex and Transformer Engine, which keep `step` as a number in the parameter group."""

    adam_w_mode = 1

    def __init__(self, parameters, lr, betas, eps, weight_decay):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), t = group["betas"], group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"].lerp_(p.grad, 1 - b1), state["exp_avg_sq"]
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m, v.div(1 - b2**t).sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - b1**t))


class Odd(torch.optim.Optimizer):
    """An optimizer whose state is odd: None, numbers, lists, tensors that are replaced or dropped, settings."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.0, "last_norm": None, "seen": torch.zeros(1)})
        self.count, self.scale = 0, torch.ones(1)

    @torch.no_grad()
    def step(self):
        self.count += 1
        self.scale.mul_(0.9)
        for group in self.param_groups:
            group["last_norm"] = sum(float(p.grad.norm()) for p in group["params"])
            group["seen"] += 1
            group.setdefault("began_with", group["last_norm"])
            for p in group["params"]:
                state = self.state[p]
                state["momentum_buffer"] = p.grad.clone() if "momentum_buffer" in state else None
                state["number"] = state.get("number", 0) + 1
                state.setdefault("history", []).append(group["last_norm"])
                state["average"] = 0.9 * state.get("average", 0.0) + p.grad
                if state.pop("to_be_dropped", None) is None:
                    state["to_be_dropped"] = p.grad.clone()
                p.add_(state["average"], alpha=-group["lr"] * float(self.scale) / self.count)


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


MAKERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, **SETTINGS),
    "Adam": lambda groups: torch.optim.Adam(groups, **SETTINGS),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "SGD, every parameter by itself": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, foreach=False),
    "SGD without momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "fused": lambda groups: FusedAdam(groups, **SETTINGS, weight_decay=0.0),
    "odd": Odd,
}


def make(kind: str) -> torch.optim.Optimizer:
    values = parameters()
    return MAKERS[kind]([{"params": values[:1], "weight_decay": 0.1}, {"params": values[1:], "weight_decay": 0.0}])


def set_gradients(optimizer: torch.optim.Optimizer, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator) * scale


def state_of(optimizer: torch.optim.Optimizer) -> list:
    """Everything that the next step depends on: own numbers, settings of groups, parameters, their states or None."""
    found = [copy.deepcopy({name: getattr(optimizer, name, None) for name in ("count", "scale")})]
    for group in optimizer.param_groups:
        found.append(copy.deepcopy({name: value for name, value in group.items() if name != "params"}))
        for p in group["params"]:
            found += [p.detach().clone(), copy.deepcopy(optimizer.state[p]) if p in optimizer.state else None]
    return found


def assert_same(a, b) -> None:
    """Assert that both are equal, bit for bit, with the same keys in all dictionaries."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_a_snapshot_restores_every_bit(kind, steps_before):
    """The first step is undone as well, before which most optimizers have no state."""
    optimizer = make(kind)
    rollback = Snapshot([optimizer])
    for seed in range(steps_before):
        set_gradients(optimizer, seed)
        rollback.before_step()
        optimizer.step()
        rollback.prepare()
    before = state_of(optimizer)
    set_gradients(optimizer, 99)
    rollback.before_step()
    optimizer.step()
    assert not torch.equal(before[2], state_of(optimizer)[2])
    gradients = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
    rollback.undo()
    assert_same(state_of(optimizer), before)
    assert_same([p.grad for group in optimizer.param_groups for p in group["params"]], gradients)


@pytest.mark.parametrize("kind", MAKERS)
def test_training_goes_on_from_a_rollback_as_if_nothing_had_been(kind):
    steps = [1.0, 0.5, 2.0, 1.0]
    straight, winding = make(kind), make(kind)
    rollback = Snapshot([winding])
    for seed, scale in enumerate(steps):
        set_gradients(straight, seed, scale)
        straight.step()
        set_gradients(winding, seed, scale * 7)
        rollback.before_step()
        winding.step()
        rollback.undo()
        set_gradients(winding, seed, scale)
        winding.step()
        rollback.prepare()
    assert_same(state_of(winding), state_of(straight))


def test_the_settings_that_come_back_are_those_of_the_step():
    """Undoing a step restores the learning rate that the step had, even if it changed after the copying began."""
    optimizer = make("SGD")
    rollback = Snapshot([optimizer])
    set_gradients(optimizer, 0)
    rollback.prepare()
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    rollback.before_step()
    optimizer.step()
    rollback.undo()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_the_buffers_of_a_snapshot_are_made_once():
    optimizer = make("AdamW")
    rollback = Snapshot([optimizer])
    places = []
    for seed in range(3):
        set_gradients(optimizer, seed)
        rollback.before_step()
        optimizer.step()
        places.append({key: buffer.data_ptr() for key, buffer in rollback._buffers.items()})
    assert places[1].items() >= places[0].items()
    assert places[2] == places[1]


@pytest.mark.parametrize("kind", ["AdamW", "fused"])
@pytest.mark.parametrize("steps_before", [0, 1, 20])
def test_the_inverse_is_exact_up_to_rounding(kind, steps_before):
    """Parameters agree to 1e-6 of their size and moments to 1e-5 of the gradient's, as the documentation states."""
    optimizer = make(kind)
    rollback = Inverse([optimizer])
    for seed in range(steps_before):
        set_gradients(optimizer, seed)
        optimizer.step()
    before = state_of(optimizer)
    set_gradients(optimizer, 99)
    optimizer.step()
    rollback.undo()
    for x, y in zip(before, state_of(optimizer), strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6)
        elif x is not None and "exp_avg" in x:
            torch.testing.assert_close(y["exp_avg"], x["exp_avg"], rtol=0, atol=1e-5)
            torch.testing.assert_close(y["exp_avg_sq"], x["exp_avg_sq"], rtol=0, atol=1e-5)
            assert (y["exp_avg_sq"] >= 0).all()
            assert y.get("step") == x.get("step")
        elif x is not None:
            assert y.get("step", 0) == x.get("step", 0)


def test_the_inverse_makes_no_second_moment_negative():
    """The optimizer's kernel may round in another direction than the inverse, as if a moment had been below zero."""
    optimizer = make("AdamW")
    for scale in (0.0, 1.0):
        set_gradients(optimizer, 1, scale)
        optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"] = torch.nextafter(state["exp_avg_sq"], torch.zeros(()))
    Inverse([optimizer]).undo()
    assert all((state["exp_avg_sq"] >= 0).all() for state in optimizer.state.values())


def test_the_inverse_leaves_alone_what_had_no_gradient():
    optimizer = make("AdamW")
    set_gradients(optimizer, 1)
    frozen = optimizer.param_groups[0]["params"][0]
    frozen.grad = None
    before = frozen.detach().clone()
    optimizer.step()
    Inverse([optimizer]).undo()
    assert torch.equal(frozen, before)


def test_only_adamw_has_an_inverse():
    for optimizer in (make("SGD"), make("Adam"), make("Adagrad"), torch.optim.AdamW(parameters(), amsgrad=True)):
        with pytest.raises(ValueError, match=r"only AdamW can be inverted, and the optimizer is \w+$"):
            make_rollback("inverse", [optimizer])
    with pytest.raises(ValueError, match="keeps no copy"):
        make_rollback("inverse", [make("AdamW")], on_host=True)


class Replacing(torch.optim.SGD):
    """An optimizer whose step puts another tensor in place of a parameter's data."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


def test_a_step_that_replaces_the_data_of_parameters_is_undone():
    buffer = torch.arange(6.0)
    parameter = torch.nn.Parameter(buffer.view(2, 3))
    parameter.grad = torch.ones(2, 3)
    optimizer = Replacing([parameter], lr=1.0)
    snapshot = Snapshot([optimizer])
    snapshot.before_step()
    optimizer.step()
    snapshot.undo()
    assert torch.equal(parameter, torch.arange(6.0).view(2, 3))
    assert parameter.data_ptr() == buffer.data_ptr(), "the parameter is again a view of the buffer"
