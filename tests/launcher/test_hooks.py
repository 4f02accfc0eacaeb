"""Hooks replace a function wherever it was imported, check it first, and leave nothing behind."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from megatron.zero_bubble.launcher.hooks import Call, Hook, InstalledHooks
from megatron.zero_bubble.session.start_up import SessionError


def library() -> ModuleType:
    """A module with a function and a class, as a library's."""
    module = ModuleType("a_library")

    def scale(value: float, factor: float = 2.0) -> float:
        return value * factor

    class Model:
        def __init__(self, width: int) -> None:
            self.width = width

    module.scale, module.Model = scale, Model
    return module


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The library, and a module that has imported from it by name."""
    first, second = library(), ModuleType("a_script")
    second.scale = second.scale_under_another_name = first.scale
    monkeypatch.setitem(sys.modules, "a_library", first)
    monkeypatch.setitem(sys.modules, "a_script", second)
    return first, second


def tripled(call: Call) -> float:
    call["factor"] = 3.0
    return call.proceed() + call["value"] / 100


def hook(name: str = "scale", *parameters: str, around=tripled, module: str = "a_library") -> Hook:
    return Hook(f"{module}:{name}({', '.join(parameters)})", "to see it work", around)


def test_every_name_of_a_function_is_replaced_and_restored(modules):
    first, second = modules
    original = first.scale
    hooks = InstalledHooks([hook("scale", "value", "factor")], "1.0")
    assert first.scale(1.0) == second.scale(1.0) == second.scale_under_another_name(value=1.0) == 3.01
    assert first.scale.__name__ == "scale"
    hooks.restore()
    assert first.scale is second.scale is second.scale_under_another_name is original
    hooks.restore()
    assert first.scale is original


def test_a_name_that_was_imported_in_the_meantime_is_restored(modules, monkeypatch):
    first, _ = modules
    original = first.scale
    hooks = InstalledHooks([hook()], "1.0")
    late = ModuleType("a_late_script")
    late.scale = first.scale
    monkeypatch.setitem(sys.modules, "a_late_script", late)
    hooks.restore()
    assert late.scale is original


def test_a_method_is_hooked_in_its_class(modules):
    first, _ = modules

    def wider(call: Call) -> None:
        call["width"] += 1
        call.proceed()

    hooks = InstalledHooks([hook("Model.__init__", "width", around=wider)], "1.0")
    assert first.Model(4).width == 5
    hooks.restore()
    assert first.Model(4).width == 4


def test_a_static_method_is_hooked_in_its_class(modules):
    first, _ = modules
    first.Model.scale = staticmethod(lambda value, factor=2.0: value * factor)
    hooks = InstalledHooks([hook("Model.scale", "value", "factor")], "1.0")
    assert first.Model.scale(1.0) == first.Model(4).scale(1.0) == 3.01
    hooks.restore()
    assert first.Model.scale(1.0) == first.Model(4).scale(1.0) == 2.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (hook("rescale"), ["a_library.rescale", "1.0"]),
        (hook("Model.build"), ["a_library.Model.build"]),
        (hook("scale", "value", "power"), ["a_library.scale", "power", "(value: 'float', factor: 'float' = 2.0)"]),
        (hook(module="no_such_library"), ["no_such_library.scale"]),
    ],
    ids=["no function", "no method", "another signature", "no module"],
)
def test_a_target_that_is_not_as_expected_stops_before_anything_is_replaced(modules, wrong, words):
    first, _ = modules
    original = first.scale
    with pytest.raises(SessionError) as error:
        InstalledHooks([hook(), wrong], "1.0")
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)
    assert first.scale is original


def test_a_hook_may_be_for_some_versions_only():
    versions = ("0.9.2", "0.16.1", "0.17.0rc0", "0.18.0", "1.2")

    def covered(**limits: str) -> tuple[str, list[bool]]:
        needed = Hook("a_library:scale()", "to see", tripled, **limits)
        return needed.version_range, [needed.applies_to(version) for version in versions]

    assert covered() == ("", [True] * 5)
    assert covered(since="0.16") == ("from 0.16 on", [False, True, True, True, True])
    assert covered(until="0.17") == ("until 0.17", [True, True, True, False, False])
    assert covered(since="0.17", until="0.17") == ("0.17 only", [False, False, True, False, False])
