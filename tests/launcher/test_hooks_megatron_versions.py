"""Every supported version of megatron-core and Megatron-LM has what the launcher relies on, by their own sources."""

from __future__ import annotations

import json
from pathlib import Path

import megatron.core
import pytest

from megatron.zero_bubble.launcher.hooks import minor_version
from megatron.zero_bubble.launcher.launch import SUPPORTED
from tests.launcher.megatron_functions import (
    RECORD,
    Functions,
    Source,
    common_names,
    find,
    functions,
    imported,
    installed,
    tables,
)

RECORDED = json.loads(RECORD.read_text())
FUNCTIONS: dict[str, Functions] = RECORDED["functions"]
WRAPPERS = {"megatron.core.models.mamba.mamba_model.MambaModel.__init__"}
"""Functions that call another one, which is hooked, in the versions that a table does not name."""
COMMON: dict[str, list[str]] = RECORDED["names in all versions"]


def test_every_supported_version_is_recorded_and_no_other():
    assert sorted(minor_version(version) for version in FUNCTIONS) == sorted(SUPPORTED)


@pytest.mark.parametrize("version", FUNCTIONS)
def test_a_version_has_every_function_of_the_tables_with_its_parameters(version: str):
    """Where this fails for a function that is not recorded, `megatron_functions.py` says how to record it."""
    recorded = FUNCTIONS[version]
    assert recorded.keys() == {needed.target for needed in tables()}
    for needed in tables():
        parameters = recorded[needed.target]
        if needed.applies_to(version):
            assert parameters is not None, needed.target
            assert set(needed.parameters) <= set(parameters), needed.target
        elif needed.target not in WRAPPERS:
            assert parameters is None, f"{needed.target} is there: it need not be ({needed.version_range})"


def test_every_version_has_everything_that_is_imported():
    """Where this fails for a module that is not recorded, `megatron_functions.py` says how to record it."""
    names = [name.rpartition(".")[::2] for name in sorted(imported())]
    assert [module for module, _ in names if module not in COMMON] == []
    assert [f"{module}.{name}" for module, name in names if name not in COMMON[module]] == []


def test_the_record_of_the_installed_version_is_right():
    found = functions([installed()])
    recorded = FUNCTIONS[megatron.core.__version__]
    of_core = [name for name in recorded if name.startswith("megatron.core.")]
    assert len(of_core) > 10
    assert {name: recorded[name] for name in of_core} == {name: found[name] for name in of_core}
    for module, names in common_names([[installed()]]).items():
        assert set(COMMON[module]) <= set(names) or not module.startswith("megatron.core.")


def test_functions_are_found_where_python_finds_them(tmp_path: Path):
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .base import Base as Renamed, run\nfrom abc import ABC\n")
    (package / "base.py").write_text(
        "import abc\ntry:\n    import te\n    run = te.run\nexcept ImportError:\n    def run(a, *, b=1): ...\n"
        "class Root(abc.ABC):\n    def inherited(self, x): ...\n"
        "class Base(Root):\n    LIMIT: int = 3\n    if LIMIT:\n        def own(self): ...\n"
    )
    sources = [Source(tmp_path)]
    assert find(sources, "megatron.core.base.run") == find(sources, "megatron.core.run") == ["a", "b"]
    assert find(sources, "megatron.core.Renamed.inherited") == ["self", "x"]
    assert find(sources, "megatron.core.base.Base.own") == ["self"]
    assert find(sources, "megatron.core.Renamed") == find(sources, "megatron.core.ABC") == []
    for missing in ("Renamed.other", "ABC.register", "base.te2", "base.Base.own.deeper", "nowhere.run"):
        assert find(sources, f"megatron.core.{missing}") is None
