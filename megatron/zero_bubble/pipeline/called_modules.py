"""Finds the modules inside a stage's layers whose forwards autograd sees, and whose backwards may be split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


def callable_modules(modules: Iterable[nn.Module], wholes: tuple[type, ...]) -> Iterator[nn.Module]:
    """Yield `modules` and all submodules once, except the submodules of modules whose class is in `wholes`."""
    seen: set[nn.Module] = set()
    pending = list(modules)[::-1]
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            yield module
            # torch's attention multiplies with the weights of its inner layer, and does not call the inner layer.
            if not isinstance(module, wholes):
                pending += reversed(list(module.children()))


def inside_sharded(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules that `fully_shard` has sharded, and their submodules.

    The backwards of these modules cannot be split: `fully_shard` reduces gradients, and drops the whole weights, at the
    end of a module's backward.
    """
    every = nn.ModuleList(modules).modules()
    return {inside for module in every if hasattr(module, "reshard") for inside in module.modules()}


def is_patched(module: nn.Module) -> bool:
    """Tell whether a module or submodule has a replaced forward, which may use other modules' parameters."""
    return any("forward" in vars(each) for each in module.modules())
