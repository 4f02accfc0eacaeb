"""Kernels of Mamba and of gated delta nets in plain PyTorch, for machines without CUDA.

The functions of this module replace the kernels of `mamba_ssm` and `fla` in megatron-core. Mamba's scan runs over the
whole sequence at once and not chunk by chunk; its memory is therefore quadratic in the sequence's length. The gated
delta rule is megatron-core's own PyTorch function, which megatron-core uses only in deterministic mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class GatedRMSNorm(torch.nn.Module):
    """An RMSNorm over groups of features; the input is first multiplied by the SiLU of a gate.

    Args:
        hidden_size: number of features.
        group_size: number of features in a group; by default all features.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate, "megatron-core's mixers multiply with the gate first"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if z is not None:
            x = x * torch.nn.functional.silu(z)
        groups = x.float().unflatten(-1, (-1, self.group_size))
        return torch.nn.functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2).to(x) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        tensors = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            tensors,
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **unused: Any,
) -> torch.Tensor:
    """Compute `mamba_chunk_scan_combined`: the outputs of a selective state space model with an initial state of zeros.

    The state of a head is `h_i = exp(dt_i a) h_(i-1) + dt_i b_i x_i`, and the output of a head is `c_i h_i + D x_i`.

    Args:
        x: [batch, length, heads, size].
        dt: [batch, length, heads].
        a: [heads].
        b, c: [batch, length, groups, states].
        D: [heads] or [heads, size].
        z: gate in the shape of `x`.
    """
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    heads_in_group = x.shape[2] // b.shape[2]
    b, c = (part.float().repeat_interleave(heads_in_group, dim=2) for part in (b, c))
    total = (dt * a).cumsum(dim=1).transpose(1, 2)
    decay = total.unsqueeze(-1) - total.unsqueeze(-2)
    is_later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    weights = torch.einsum("bihn,bjhn->bhij", c, b) * decay.masked_fill(is_later, -torch.inf).exp()
    y = torch.einsum("bhij,bjhp->bihp", weights, x.float() * dt.unsqueeze(-1))
    if D is not None:
        y = y + x.float() * (D if D.dim() == 2 else D.unsqueeze(-1))
    if z is not None:
        y = y * torch.nn.functional.silu(z.float())
    return y.to(x)


def convolve_and_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    **unused: Any,
) -> torch.Tensor:
    """Compute `mamba_split_conv1d_scan_combined`: a causal convolution of x, b and c, then the scan with the gate z.

    Args:
        zxbcdt: [batch, length, features], with z, x, b, c and dt in this order.
        conv1d_weight: [features of x, b and c, width].
        D: [heads] or [heads, size]; must be [heads, size] if `headdim` is None.

    Returns:
        [batch, length, heads x size].
    """
    size = D.shape[1] if headdim is None else headdim
    heads = A.shape[0]
    inner = heads * size
    z, xbc, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    xbc, _ = convolved(xbc, conv1d_weight, conv1d_bias, activation)
    of_group = (conv1d_weight.shape[0] - inner) // 2
    x, b, c = xbc.split([inner, of_group, of_group], dim=-1)
    x, z = (part.unflatten(-1, (heads, size)) for part in (x, z))
    b, c = (part.unflatten(-1, (ngroups, -1)) for part in (b, c))
    return scan(x, dt, A, b, c, D=D, z=z, dt_bias=dt_bias, dt_softplus=True).flatten(-2)


def delta_net_kernels(package: ModuleType, delta_rule: Any) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield (megatron-core module, attribute, replacement) for `HAVE_FLA` and the kernels of gated delta nets.

    Args:
        package: megatron-core's package `gated_delta_net`; from megatron-core 0.19 on, modules of this package import
            the kernels, too.
        delta_rule: the gated delta rule in plain PyTorch.
    """
    inside = [value for value in vars(package).values() if isinstance(value, ModuleType)]
    kernels = {"l2norm": normalized, "causal_conv1d": convolved, "chunk_gated_delta_rule": delta_rule}
    for module in (package, *(module for module in inside if module.__name__.startswith(package.__name__))):
        for name, kernel in {"HAVE_FLA": True, **kernels}.items():
            yield module, name, kernel


def normalized(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Divide `x` by its Euclidean norm over the dimension `dim`."""
    return (x.float() * torch.rsqrt(x.float().square().sum(dim, keepdim=True) + eps)).to(x)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, **unused: Any
) -> tuple[torch.Tensor, None]:
    """Apply a causal convolution to each feature, along the sequence, and then an activation function.

    Args:
        x: [batch, length, features].
        weight: [features, width].
        activation: `silu` or `swish`, two names of the same activation function.

    Returns:
        The result of shape [batch, length, features], and None, because no state of the convolution is kept.
    """
    assert activation in ("silu", "swish")
    padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    result = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))
    return torch.nn.functional.silu(result).transpose(1, 2), None
