"""Every supported version of megatron-core and Megatron-LM has what the launcher relies on, by their own sources."""

from __future__ import annotations

import json
from pathlib import Path

import megatron.core
import pytest

from megatron.zero_bubble.launcher.hooks import minor_version
from megatron.zero_bubble.launcher.launch import SUPPORTED
from tests.launcher.megatron_functions import RECORD, Record, Source, find, imported, installed, record, tables

RECORDED: dict[str, Record] = json.loads(RECORD.read_text())


def test_every_supported_version_is_recorded_and_no_other():
    assert sorted(minor_version(version) for version in RECORDED) == sorted(SUPPORTED)


@pytest.mark.parametrize("version", RECORDED)
def test_what_is_recorded_is_what_is_relied_on(version: str):
    """Else: record it again, as `megatron_functions.py` says."""
    assert RECORDED[version].keys() == {needed.target for needed in tables()} | imported()


@pytest.mark.parametrize("version", RECORDED)
def test_a_version_has_every_function_of_the_tables_with_its_parameters(version: str):
    for needed in tables():
        parameters = RECORDED[version][needed.target]
        if needed.applies_to(version):
            assert parameters is not None, needed.target
            assert set(needed.parameters) <= set(parameters), needed.target
        else:
            assert parameters is None, f"{needed.target} is there: it need not be for {needed.versions} alone"


@pytest.mark.parametrize("version", RECORDED)
def test_a_version_has_everything_that_is_imported(version: str):
    assert [name for name in sorted(imported()) if RECORDED[version][name] is None] == []


def test_the_record_of_the_installed_version_is_right():
    recorded, found = RECORDED[megatron.core.__version__], record([installed()])
    ours = [name for name in recorded if name.startswith("megatron.core.")]
    assert {name: recorded[name] for name in ours} == {name: found[name] for name in ours}


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
