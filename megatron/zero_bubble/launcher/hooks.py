"""Replaces functions of megatron-core and Megatron-LM, and restores the originals."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron.zero_bubble.session.start_up import SessionError

Function = Callable[..., Any]


class Call:
    """One call of a hooked function. A hook reads and changes the call's arguments by name, and may call `proceed`."""

    def __init__(self, original: Function, bound: inspect.BoundArguments) -> None:
        self._original = original
        self._bound = bound

    def __getitem__(self, parameter: str) -> Any:
        return self._bound.arguments[parameter]

    def __setitem__(self, parameter: str, value: Any) -> None:
        self._bound.arguments[parameter] = value

    def get(self, parameter: str) -> Any:
        """Return an argument of the call, or None if the hooked function has no parameter of this name."""
        return self._bound.arguments.get(parameter)

    def proceed(self) -> Any:
        """Call the original function with the current arguments, and return its result."""
        return self._original(*self._bound.args, **self._bound.kwargs)


@dataclass(frozen=True)
class Needed:
    """A function of megatron-core or Megatron-LM that the launcher relies on.

    Attributes:
        signature: `module:function(parameter, ...)` or `module:Class.method(parameter, ...)`; the function must have
            the parameters that the signature names, and may have others.
        reason: why the launcher needs the function; the documentation shows this reason.
        since: first version of megatron-core, such as `0.18`, that has the function; empty without a first version.
        until: last version of megatron-core that has the function; empty if the newest version has the function.
    """

    signature: str
    reason: str
    since: str = field(default="", kw_only=True)
    until: str = field(default="", kw_only=True)

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\w+", self.signature.partition("(")[2])

    @property
    def target(self) -> str:
        return self.signature.partition("(")[0].replace(":", ".")

    def applies_to(self, version: str, *, has_trainer: bool = True) -> bool:
        """Return whether `version` has the function; functions of Megatron-LM exist only if `has_trainer` is set."""
        if self.signature.startswith(("megatron.training.", "megatron.legacy.")) and not has_trainer:
            return False
        number = _number(version)
        return not (self.since and number < _number(self.since)) and not (self.until and number > _number(self.until))

    @property
    def version_range(self) -> str:
        """The versions that have the function, in words; empty if all supported versions have the function."""
        if self.since and self.until:
            return f"{self.since} only" if self.since == self.until else f"{self.since} to {self.until}"
        return f"from {self.since} on" if self.since else f"until {self.until}" if self.until else ""


@dataclass(frozen=True)
class Hook(Needed):
    """A function to replace by a hook; `around` gets each call of the function, and returns the result of the call."""

    around: Callable[[Call], Any]


def minor_version(version: str) -> str:
    """Return the first two numbers of a version, such as `0.16` for version 0.16.1rc0."""
    return ".".join(version.split(".")[:2])


def _number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version as integers, which are compared from left to right."""
    return tuple(int(number) for number in minor_version(version).split("."))


@dataclass(frozen=True)
class Target:
    """A function that the launcher has found as the attribute `attribute` of the module or class `owner`."""

    owner: Any
    attribute: str
    function: Function
    signature: inspect.Signature


class InstalledHooks:
    """Replaces functions by hooks until `restore()` is called, also in modules that imported the functions by name.

    The constructor checks all functions before it replaces the first function.

    Raises:
        SessionError: a function is missing, or lacks a parameter.
    """

    def __init__(self, hooks: Iterable[Hook], version: str) -> None:
        targets = [(hook, find_target(hook, version)) for hook in hooks]
        self._replaced = [(target, _make_replacement(hook, target)) for hook, target in targets]
        _replace_everywhere((target, target.function, replacement) for target, replacement in self._replaced)

    def restore(self) -> None:
        """Restore the original functions, also in modules that imported a replacement; a second call does nothing."""
        _replace_everywhere((target, replacement, target.function) for target, replacement in self._replaced)
        self._replaced = []


def find_target(needed: Needed, version: str) -> Target:
    """Import the module of a needed function, and find the function; `version` appears in error messages only.

    Raises:
        SessionError: the function is missing, or lacks a parameter.
    """
    try:
        module, _, name = needed.signature.partition("(")[0].partition(":")
        owner_name, _, attribute = name.rpartition(".")
        owner = pkgutil.resolve_name(f"{module}:{owner_name}")
        function = getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise SessionError(
            f"megatron-core {version} has no {needed.target}, which the launcher needs: {error}"
        ) from error
    signature = inspect.signature(function)
    missing = [name for name in needed.parameters if name not in signature.parameters]
    if missing:
        raise SessionError(
            f"{needed.target} of megatron-core {version} does not have the parameters that the launcher needs: "
            f"no {', '.join(missing)} in {signature}"
        )
    return Target(owner, attribute, function, signature)


def _make_replacement(hook: Hook, target: Target) -> Function:
    @functools.wraps(target.function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        bound = target.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return hook.around(Call(target.function, bound))

    return replacement


def _replace_everywhere(changes: Iterable[tuple[Target, Function, Function]]) -> None:
    """For each (target, old, new), replace `old` by `new` in the target and in modules that import `old`."""
    replacements: dict[int, Function] = {}
    for target, old, new in changes:
        is_static = isinstance(inspect.getattr_static(target.owner, target.attribute), staticmethod)
        setattr(target.owner, target.attribute, staticmethod(new) if is_static else new)
        replacements[id(old)] = new
    for module in list(sys.modules.values()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        for name, value in list(names.items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
