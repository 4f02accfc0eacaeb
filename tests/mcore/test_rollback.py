"""Undoing a step of Adam: torch's, and one that counts its steps as apex's and Transformer Engine's do."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron.zero_bubble.mcore.rollback import Inverse, Snapshot, make_rollback

SHAPES = [(64, 32), (64,), (7, 5, 3)]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


class FusedAdam(torch.optim.Optimizer):
    """Stands in for apex's and Transformer Engine's: their states, `step` as a number in the parameter group."""

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


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make(kind: str) -> torch.optim.Optimizer:
    groups = parameters()
    given = [{"params": groups[:1], "weight_decay": 0.1}, {"params": groups[1:], "weight_decay": 0.0}]
    if kind == "torch":
        return torch.optim.AdamW(given, **SETTINGS)
    return FusedAdam(given, **SETTINGS, weight_decay=0.0)


def set_gradients(optimizer: torch.optim.Optimizer, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator) * scale


def state_of(optimizer: torch.optim.Optimizer) -> list:
    """Everything that the next step depends on."""
    found = []
    for group in optimizer.param_groups:
        found.append(group.get("step"))
        for p in group["params"]:
            found += [p.detach().clone(), copy.deepcopy(dict(optimizer.state.get(p, {})))]
    return found


def assert_same(a, b) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y)
        elif isinstance(x, dict):
            assert x.keys() == y.keys()
            assert all(torch.equal(torch.as_tensor(x[k]), torch.as_tensor(y[k])) for k in x)
        else:
            assert x == y


@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_a_snapshot_restores_every_bit(kind, steps_before):
    """The very first step too, before which Adam has no state."""
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
    assert not torch.equal(before[1], state_of(optimizer)[1])
    rollback.undo()
    assert_same(state_of(optimizer), before)


@pytest.mark.parametrize("kind", ["torch", "fused"])
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


def test_the_buffers_of_a_snapshot_are_made_once():
    optimizer = make("torch")
    rollback = Snapshot([optimizer])
    places = []
    for seed in range(3):
        set_gradients(optimizer, seed)
        rollback.before_step()
        optimizer.step()
        places.append({key: buffer.data_ptr() for key, buffer in rollback._buffers.items()})
    assert places[1].items() >= places[0].items()
    assert places[2] == places[1]


@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("steps_before", [0, 1, 20])
def test_the_inverse_is_exact_up_to_rounding(kind, steps_before):
    """Parameters to 1e-6 of their size, moments to 1e-5 of the gradient's: what the documentation states."""
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
        elif isinstance(x, dict) and x:
            torch.testing.assert_close(y["exp_avg"], x["exp_avg"], rtol=0, atol=1e-5)
            torch.testing.assert_close(y["exp_avg_sq"], x["exp_avg_sq"], rtol=0, atol=1e-5)
            assert (y["exp_avg_sq"] >= 0).all()
            assert y.get("step") == x.get("step")
        elif isinstance(x, int):
            assert y == x


def test_the_inverse_leaves_alone_what_had_no_gradient():
    optimizer = make("torch")
    set_gradients(optimizer, 1)
    frozen = optimizer.param_groups[0]["params"][0]
    frozen.grad = None
    before = frozen.detach().clone()
    optimizer.step()
    Inverse([optimizer]).undo()
    assert torch.equal(frozen, before)


def test_only_adamw_has_an_inverse():
    for optimizer in (torch.optim.SGD(parameters(), lr=0.1), torch.optim.AdamW(parameters(), amsgrad=True)):
        with pytest.raises(ValueError, match=r"only AdamW can be inverted, and the optimizer is \w+$"):
            make_rollback("inverse", [optimizer])
    with pytest.raises(ValueError, match="keeps no copy"):
        make_rollback("inverse", [make("torch")], on_host=True)
