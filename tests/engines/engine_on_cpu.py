"""Runs Transformer Engine's own Python on a CPU: torch's functions take the places of its kernels.

Transformer Engine's wheel of Python sources does everything but compute: it saves tensors, queues W, returns the
gradients of biases, accumulates into `main_grad` and calls the hooks of DDP. Its kernels are in another package, which
needs CUDA. Python must run with `-O`, because Transformer Engine asserts that there is a GPU.

The folder has another name than the package, which scripts in `tests/` would otherwise find in this folder.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

_HOPPER = SimpleNamespace(name="none", major=9, minor=0, multi_processor_count=132, total_memory=2**36)
"""Properties of a GPU, by which Transformer Engine chooses a recipe of fp8, which no layer then uses."""
_COMPILED = ("transformer_engine_torch", "onnx", "onnxscript")
"""Packages with compiled code; nothing of them runs."""


def import_engine() -> None:
    """Import Transformer Engine, then megatron-core with it, and replace the kernels that the layers of a GPT call."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # so that no library of CUDA is loaded
    # Its own `__init__` would load the compiled package.
    spec = find_spec("transformer_engine")
    assert spec is not None
    package: Any = module_from_spec(spec)
    in_triton = [path.stem for path in Path(package.__path__[0], "pytorch", "triton").glob("*.py")]
    for name in (*_COMPILED, *(f"transformer_engine.pytorch.triton.{name}" for name in in_triton)):
        stand_in = MagicMock()
        name = name.removesuffix(".__init__")
        stand_in.__spec__, stand_in.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = stand_in
    package.__version__ = version("transformer-engine")
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda name: None  # type: ignore[attr-defined]
    package.pytorch = importlib.import_module("transformer_engine.pytorch")
    _replace_kernels()
    torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: _HOPPER  # type: ignore[assignment]
    # megatron-core has kernels of its own for optimizers and norms of gradients.
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]


def use_local_attention_and_norms() -> None:
    """Let models of Transformer Engine's layers have megatron-core's attention and torch's norms."""
    from megatron.core.extensions import transformer_engine

    from megatron.zero_bubble.mcore import layer_spec
    from megatron.zero_bubble.mcore.attention import LocalAttention

    class Attention(LocalAttention):
        """Takes the number of a kernel's splits, which Transformer Engine's attention has."""

        def __init__(self, *args: Any, num_splits: int | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    local = {transformer_engine.TEDotProductAttention: Attention, transformer_engine.TENorm: layer_spec.LocalNorm}
    for name, module in list(sys.modules.items()):
        for key, value in list(vars(module).items()) if name.startswith("megatron.") else ():
            if isinstance(value, type) and value in local:
                setattr(module, key, local[value])


def _replace_kernels() -> None:
    names = ("module.base", "module.linear", "module.layernorm_linear", "module.grouped_linear", "cpp_extensions")
    modules = [importlib.import_module(f"transformer_engine.pytorch.{name}") for name in names]
    for module in modules:
        for name, kernel in _KERNELS.items():
            if hasattr(module, name):
                setattr(module, name, kernel)
    modules[0].torch = _Replaced(torch, cuda=_Replaced(torch.cuda, is_available=lambda: True))  # type: ignore[attr-defined]
    base: Any = modules[0].TransformerEngineBaseModule
    base.prepare_forward = _as_on_a_gpu(base.prepare_forward)
    kernels = sys.modules["transformer_engine_torch"]
    kernels.layernorm_bwd = _layer_norm_backward  # type: ignore[attr-defined]
    kernels.rmsnorm_bwd = _rms_norm_backward  # type: ignore[attr-defined]


def _as_on_a_gpu(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.Tensor, "is_cuda", True):
            return method(*args, **kwargs)

    return call


class _Replaced:
    """A module with some of its attributes replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        vars(self).update(replaced, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, -2)


@torch.no_grad()
def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    layout: str = "TN",
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    grad: bool = False,
    accumulate: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Multiply as `general_gemm` does: forward (TN), gradient of the input (NN) or of the weight and bias (NT)."""
    if layout == "NT":
        product = _rows(b).t() @ _rows(a)
    else:
        product = _rows(b) @ (_rows(a).t() if layout == "TN" else _rows(a))
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    of_bias = _rows(b).sum(0) if bias is not None and grad else None
    if bias is not None and not grad:
        product = product + bias
    if out is not None:
        product = out.add_(product) if accumulate else out.copy_(product)
    return (product if out_dtype is None else product.to(out_dtype)), of_bias, None, None


@torch.no_grad()
def _products(
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    out: list[torch.Tensor],
    *unused: Any,
    m_splits: list[int] | None = None,
    single_output: bool = False,
    bias: list[torch.Tensor] | None = None,
    use_bias: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], None]:
    """Multiply as `general_grouped_gemm` does, expert by expert."""
    parts = list(torch.split(out[0], m_splits or [])) if single_output else out
    options = {name: options[name] for name in ("layout", "accumulate", "grad") if name in options}
    biases = bias if use_bias and bias is not None else [None] * len(a)
    of_biases = [
        _product(left, right, out=part, bias=one, **options)[1]
        for left, right, part, one in zip(a, b, parts, biases, strict=True)
    ]
    return out, of_biases, None


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _normalize(
    x: torch.Tensor,
    out: Any,
    weight: torch.Tensor,
    bias: Any,
    eps: float,
    quantizer: Any,
    dtype: Any,
    kind: str,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute as `apply_normalization` does; the backward gets `eps` in place of the statistics, which it computes."""
    normed = _rms_norm(x, weight, eps) if kind == "RMSNorm" else _layer_norm(x, weight, bias, eps)
    return normed, torch.tensor(eps), torch.tensor(eps)


def _gradients(norm: Callable[..., torch.Tensor], gradient: torch.Tensor, *inputs: torch.Tensor, eps: float) -> Any:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(norm(*leaves, eps), leaves, gradient)


def _layer_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, mean: Any, statistic: torch.Tensor, weight: torch.Tensor, *_: Any
) -> Any:
    bias = torch.zeros_like(weight)
    return _gradients(_layer_norm, gradient, x.view_as(gradient), weight, bias, eps=statistic.item())


def _rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, statistic: torch.Tensor, weight: torch.Tensor, *_: Any
) -> Any:
    return _gradients(_rms_norm, gradient, x.view_as(gradient), weight, eps=statistic.item())


_KERNELS: dict[str, Callable[..., Any]] = {
    "general_gemm": _product,
    "general_grouped_gemm": _products,
    "apply_normalization": _normalize,
}
