"""Lets megatron-core be imported without triton; torch for CPUs does not install this compiler of GPU kernels.

The packages `mcore` and `trainer` call `stand_in_for_triton()` when one of their modules is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

_NEED_TRITON = ("batch_invariant_kernels", "paged_stash", "attention_context.triton.tensor_ops")
"""Modules of megatron-core with kernels for GPUs, which in some versions cannot be imported without triton."""
_KERNELS = ("megatron.core.ssm.ops.common.", "megatron.core.ssm.ops.mamba2.")
"""Packages of megatron-core 0.20 that contain only kernels, and that are imported together with Mamba layers."""


def stand_in_for_triton() -> None:
    """Let megatron-core's modules that need triton import a stand-in for triton, unless triton is installed."""
    if find_spec("triton") is None and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules that need triton, and loads these modules with a stand-in for triton."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_KERNELS) and not fullname.endswith(tuple(f".{name}" for name in _NEED_TRITON)):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = partial(_with_triton, spec.loader.exec_module)
        return spec


def _with_triton(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute a module of megatron-core with a stand-in for triton, which the module can import."""
    from unittest.mock import MagicMock

    added = [name for name in ("triton", "triton.language") if name not in sys.modules]
    sys.modules.update({name: MagicMock(__version__="3.0.0") for name in added})
    try:
        execute(module)
    finally:
        for name in added:
            del sys.modules[name]
