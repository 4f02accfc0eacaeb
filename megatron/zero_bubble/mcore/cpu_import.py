"""Imports megatron-core where torch was built for CPUs, and has not brought triton, the compiler of GPU kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

_NEEDS_TRITON = "paged_stash"
"""The module of megatron-core, from 0.18 on, that cannot be imported without triton. Its kernels run on GPUs only."""


def import_core() -> None:
    """Import megatron-core, with a stand-in for triton in the module that needs it, where there is none."""
    if find_spec("triton") is not None:
        importlib.import_module("megatron.core")
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("megatron.core")
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the module that needs triton, and loads it with a `_LoaderWithTriton`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[2] != _NEEDS_TRITON:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithTriton(spec.loader)
        return spec


class _LoaderWithTriton(Loader):
    """Loads a module that finds a stand-in when it imports triton."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        names = ("triton", "triton.language")
        added = [name for name in names if name not in sys.modules]
        sys.modules.update({name: MagicMock() for name in added})
        try:
            self._loader.exec_module(module)
        finally:
            for name in added:
                del sys.modules[name]
