"""The kernels of gated delta nets compute what their recurrences say."""

from __future__ import annotations

import torch
from megatron.core.ssm import gated_delta_net

from megatron.zero_bubble.mcore.cpu_kernels import convolved, delta_net_kernels, normalized


def test_a_convolution_reads_only_the_steps_before() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 3), torch.randn(3, 4), torch.randn(3)
    result, state = convolved(x, weight, bias, "silu")
    assert state is None
    for step in range(5):
        window = torch.cat([torch.zeros(2, 3, 3), x], dim=1)[:, step : step + 4]
        expected = torch.nn.functional.silu((window * weight.T).sum(1) + bias)
        torch.testing.assert_close(result[:, step], expected)


def test_a_normalized_vector_has_the_length_one_in_its_own_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        vector = normalized(torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=dtype))
        assert vector.dtype is dtype
        torch.testing.assert_close(vector, torch.tensor([[0.6, 0.8], [0.0, 0.0]], dtype=dtype))


def test_the_delta_rule_of_megatron_core_is_the_recurrence() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
    k = normalized(k)
    g, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    result, _ = gated_delta_net.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    state = torch.zeros(1, 2, 4, 4)
    for step in range(5):
        state = state * g[:, step, :, None, None].exp()
        error = (v[:, step] - torch.einsum("bhkv,bhk->bhv", state, k[:, step])) * beta[:, step, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, step], error)
        expected = torch.einsum("bhkv,bhk->bhv", state, q[:, step]) / 4**0.5
        torch.testing.assert_close(result[:, step], expected, rtol=1e-4, atol=1e-5)


def test_every_module_that_imports_a_kernel_is_found() -> None:
    found = {module for module, _, _ in delta_net_kernels(gated_delta_net, None)}
    assert any("HAVE_FLA" in vars(module) for module in found)
    assert all(module.__name__.startswith("megatron.core.ssm.gated_delta_net") for module in found)
