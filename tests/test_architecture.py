"""Imports run one way.

schedule <- planner <- runtime <- pipeline <- mcore <- schedules.py <- session <- trainer, launcher <- cli
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "megatron.zero_bubble"
LAYERS = ("schedule", "planner", "runtime", "pipeline", "mcore", "schedules", "session", "trainer", "launcher", "cli")
BESIDE = {"launcher": ("trainer",)}
"""Layers that do not import each other, whichever stands first."""
ALLOWED = {"schedule": (), "planner": (), "runtime": ("torch",), "pipeline": ("torch",)}
"""Which of torch and megatron.core these layers may import; all other layers may import both."""


def imports_of(path: Path, package: str) -> set[str]:
    """Every module that the file names in an import, wherever in the file, as absolute dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def files() -> list[tuple[str, Path, str]]:
    """(layer, file, package of the file) for every file of the package that belongs to a layer."""
    found = []
    base = ROOT / "megatron" / "zero_bubble"
    for path in sorted(base.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) > 2 and parts[2] in LAYERS:
            found.append((parts[2], path, ".".join(parts[:-1])))
    return found


@pytest.mark.parametrize(
    ("layer", "path", "package"), [pytest.param(*entry, id=str(entry[1].relative_to(ROOT))) for entry in files()]
)
def test_a_file_imports_only_from_its_own_layer_and_below(layer, path, package):
    imports = imports_of(path, package)
    above = [f"{PACKAGE}.{name}" for name in LAYERS[LAYERS.index(layer) + 1 :]]
    above += [f"{PACKAGE}.{name}" for name in BESIDE.get(layer, ())]
    above += ["pretrain_gpt", "tools", "benchmarks", "tests"]
    above += [name for name in ("torch", "megatron.core") if layer in ALLOWED and name not in ALLOWED[layer]]
    wrong = sorted(module for module in imports if any(within(module, forbidden) for forbidden in above))
    assert not wrong, f"{path.name} of {layer} must not import {wrong}"


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_programs_beside_the_package_do_not_import_the_tests(folder):
    imports = {path: imports_of(path, folder) for path in (ROOT / folder).glob("*.py")}
    wrong = {path.name for path, modules in imports.items() if any(within(module, "tests") for module in modules)}
    assert not wrong


def modules_of(folder: Path) -> set[str]:
    """Names of the modules and packages in a folder and below; `__main__` is called `main`."""
    paths = [path for path in folder.rglob("*") if path.suffix == ".py" or (path / "__init__.py").exists()]
    return {path.stem.strip("_") for path in paths}


@pytest.mark.parametrize(
    "room",
    [*(path.parent for path in sorted((ROOT / "megatron" / "zero_bubble").glob("*/__init__.py"))), ROOT / "benchmarks"],
    ids=lambda room: room.name,
)
def test_the_tests_of_a_module_are_named_after_it(room):
    """`tests/ROOM/test_MODULE.py`, or `test_MODULE_ASPECT.py`. Whole trainings are in `tests/end_to_end`."""
    folder = ROOT / "tests" / room.name
    names = modules_of(room) | {path.stem for path in folder.glob("*.py") if not path.name.startswith("test_")}
    for file in folder.glob("test_*.py"):
        name = file.stem.removeprefix("test_")
        assert any(name == module or name.startswith(f"{module}_") for module in names), file


def test_the_launcher_s_program_imports_nothing_but_the_launcher():
    imports = imports_of(ROOT / "megatron" / "zero_bubble" / "__main__.py", PACKAGE)
    ours = {module for module in imports if within(module, PACKAGE)}
    assert ours
    assert all(within(module, f"{PACKAGE}.launcher") for module in ours)


def prints(path: Path) -> bool:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


def test_one_module_prints_what_a_run_says():
    """A tool that makes data is not a run."""
    rooms = {path: layer for layer, path, _ in files() if layer in ("session", "launcher", "trainer")}
    assert [path.name for path in rooms if prints(path)] == ["reports.py"]


def test_type_checkers_see_the_public_names_where_they_are():
    tree = ast.parse((ROOT / "megatron" / "zero_bubble" / "__init__.py").read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    shown = {
        alias.name: str(node.module).removeprefix(f"{PACKAGE}.")
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == importlib.import_module(PACKAGE)._MODULES


def test_a_noun_names_one_thing():
    """No two modules have a stem in common, and no two public classes a name."""
    stems, classes = Counter[str](), Counter[str]()
    for folder in ("megatron", "tools", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.stem not in ("__init__", "__main__", "arguments"):  # of separate commands
                stems[path.stem] += 1
            defined = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
            classes.update(name for name in defined if not name.startswith("_"))
    assert [name for name, count in (stems + classes).items() if count > 1] == []


def test_the_megatron_namespace_stays_open():
    assert not (ROOT / "megatron" / "__init__.py").exists(), "it would hide megatron.core"
    assert not (ROOT / "megatron" / "core").exists(), "megatron-core is the wheel, never a copy"


def test_schedules_load_without_torch():
    code = (
        "import sys, pkgutil, importlib\n"
        "import megatron.zero_bubble.planner as planner, megatron.zero_bubble.schedule as room\n"
        "for package in (room, planner):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print([name for name in ('torch', 'numpy', 'megatron.core') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_relative_imports_are_resolved(tmp_path):
    """`imports_of`, which the tests above rely on, resolves relative imports."""
    source = tmp_path / "file.py"
    source.write_text("from . import a\nfrom ..runtime import b\ndef f():\n    import torch.nn\n")
    assert imports_of(source, f"{PACKAGE}.schedule") == {
        f"{PACKAGE}.schedule",
        f"{PACKAGE}.schedule.a",
        f"{PACKAGE}.runtime",
        f"{PACKAGE}.runtime.b",
        "torch.nn",
    }
