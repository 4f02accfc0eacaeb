"""Mamba's kernels in plain PyTorch compute the recurrences that the kernels are defined by."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from megatron.zero_bubble.mcore.cpu_kernels import GatedRMSNorm, convolve_and_scan, scan

BATCH, LENGTH, HEADS, SIZE, GROUPS, STATES, WIDTH = 2, 7, 4, 3, 2, 5, 4
INNER = HEADS * SIZE
CONVOLVED = INNER + 2 * GROUPS * STATES


def rand(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float32)


def step_by_step(x, dt, a, b, c, d):
    """The outputs of the state space model, one token after another, in double precision."""
    x, dt, a, b, c, d = (part.double() for part in (x, dt, a, b, c, d))
    state = torch.zeros(BATCH, HEADS, SIZE, STATES, dtype=torch.float64)
    group = torch.arange(HEADS) // (HEADS // GROUPS)
    outputs = []
    for i in range(LENGTH):
        decay = torch.exp(dt[:, i] * a)[..., None, None]
        state = decay * state + (dt[:, i, :, None] * x[:, i])[..., None] * b[:, i, group][:, :, None]
        outputs.append((state * c[:, i, group][:, :, None]).sum(-1) + d[:, None] * x[:, i])
    return torch.stack(outputs, dim=1)


def test_the_scan_is_the_recurrence_of_every_head_and_its_gradient_too():
    torch.manual_seed(0)
    x, dt, bias = rand(BATCH, LENGTH, HEADS, SIZE), rand(BATCH, LENGTH, HEADS), rand(HEADS)
    b, c = rand(BATCH, LENGTH, GROUPS, STATES), rand(BATCH, LENGTH, GROUPS, STATES)
    a, d, z = -rand(HEADS).exp(), rand(HEADS), rand(BATCH, LENGTH, HEADS, SIZE)
    inputs = [tensor.requires_grad_() for tensor in (x, dt, a, b, c, d)]
    y = scan(x, dt, a, b, c, chunk_size=4, D=d, z=z, dt_bias=bias, dt_softplus=True)
    expected = step_by_step(x, softplus(dt + bias), a, b, c, d) * silu(z)
    torch.testing.assert_close(y, expected.float(), rtol=1e-4, atol=1e-5)
    seed = rand(*y.shape)
    ours = torch.autograd.grad(y, inputs, seed)
    theirs = torch.autograd.grad(expected, inputs, seed.double())
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-4)


def test_later_tokens_do_not_change_earlier_outputs():
    torch.manual_seed(1)
    features = rand(BATCH, LENGTH, INNER + CONVOLVED + HEADS)
    changed = torch.cat([features[:, :4], rand(BATCH, LENGTH - 4, features.shape[2])], dim=1)
    parameters = rand(CONVOLVED, WIDTH), rand(CONVOLVED), rand(HEADS), -rand(HEADS).exp(), rand(HEADS)
    one, other = (convolve_and_scan(f, *parameters, 4, headdim=SIZE, ngroups=GROUPS) for f in (features, changed))
    assert one.shape == (BATCH, LENGTH, INNER)
    torch.testing.assert_close(one[:, :4], other[:, :4])
    assert not torch.allclose(one[:, 4], other[:, 4])


def test_the_convolution_reaches_back_over_its_width():
    torch.manual_seed(2)
    weight, bias = rand(CONVOLVED, WIDTH), rand(CONVOLVED)
    a, d, dt_bias = -rand(HEADS).exp(), rand(HEADS, SIZE), rand(HEADS)
    features = rand(BATCH, LENGTH, INNER + CONVOLVED + HEADS)
    z, xbc, dt = features.split([INNER, CONVOLVED, HEADS], dim=-1)
    convolved = torch.zeros_like(xbc)
    for i in range(LENGTH):
        for back in range(min(WIDTH, i + 1)):
            convolved[:, i] += xbc[:, i - back] * weight[:, WIDTH - 1 - back]
    x, b, c = silu(convolved + bias).split([INNER, GROUPS * STATES, GROUPS * STATES], dim=-1)
    b, c = (part.unflatten(-1, (GROUPS, STATES)) for part in (b, c))
    x, z = (part.unflatten(-1, (HEADS, SIZE)) for part in (x, z))
    expected = scan(x, dt, a, b, c, D=d, z=z, dt_bias=dt_bias, dt_softplus=True).flatten(-2)
    ours = convolve_and_scan(features, weight, bias, dt_bias, a, d, 4, ngroups=GROUPS)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_norm_normalises_groups_after_the_gate():
    torch.manual_seed(3)
    norm, x, z = GatedRMSNorm(6, eps=0.0, group_size=3), rand(2, 6), rand(2, 6)
    normalised = norm(x, z)
    assert torch.allclose(normalised.unflatten(-1, (2, 3)).square().mean(-1), torch.ones(2, 2))
    gated = x * silu(z)
    torch.testing.assert_close(normalised, norm(gated))
    torch.testing.assert_close(normalised[0, :3], gated[0, :3] / gated[0, :3].square().mean().sqrt())
