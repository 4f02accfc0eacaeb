"""What the supported versions of megatron-core and Megatron-LM have of what the launcher relies on.

It is recorded in `megatron_functions.json`, because the versions cannot all be installed beside each other, and read
from their sources without running them. After a new version, or when something new is relied on:

    for v in 0.16.1 0.17.1 0.18.2 0.19.0; do
        pip download --no-deps --only-binary :all: --python-version 3.12 --dest wheels megatron-core==$v
        git clone --depth 1 --branch core_v$v https://github.com/NVIDIA/Megatron-LM lm-$v
    done
    git clone --depth 1 https://github.com/NVIDIA/Megatron-LM lm-0.20.0
    python -m tests.launcher.megatron_functions {0.16.1,0.17.1,0.18.2,0.19.0}={wheels,lm} 0.20.0=lm

in that folder. What the wheel has is read from it, the rest from the checkout: the wheel of 0.16 has no
megatron.training, and of 0.20, which is not released, there is a checkout only.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import resolve_name
from pathlib import Path

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.cpu_hooks import cpu_hooks
from megatron.zero_bubble.launcher.hook_table import ScriptHooks
from megatron.zero_bubble.launcher.hooks import Needed

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
Functions = dict[str, "list[str] | None"]
"""The parameters of functions by full name; None where a version has no such function."""


class Source:
    """Modules as text: those of a wheel, or below a folder."""

    def __init__(self, path: Path) -> None:
        self._root = zipfile.Path(path) if path.suffix == ".whl" else path

    def text(self, module: str) -> tuple[str, bool] | None:
        """What is in the module's file, and whether it is a package."""
        stem = module.replace(".", "/")
        for name, is_package in ((f"{stem}.py", False), (f"{stem}/__init__.py", True)):
            file = self._root.joinpath(*name.split("/"))
            if file.is_file():
                return file.read_text(encoding="utf-8"), is_package
        return None


def find(sources: Sequence[Source], full_name: str) -> list[str] | None:
    """The parameters of `module.function` or `module.Class.method`, also where the module has imported it.

    None for what there is not; nothing for a class or a value.
    """
    words = full_name.split(".")
    for count in range(len(words), 0, -1):
        module = ".".join(words[:count])
        text = _text(sources, module)
        if text is not None:
            return _find_in_module(sources, module, text, words[count:])
    return None


def _text(sources: Sequence[Source], module: str) -> tuple[str, bool] | None:
    return next((text for text in (source.text(module) for source in sources) if text is not None), None)


def _find_in_module(
    sources: Sequence[Source], module: str, text: tuple[str, bool], names: list[str]
) -> list[str] | None:
    if not names:
        return []
    package = module if text[1] else module.rpartition(".")[0]
    found: list[str] | None = None
    for node in _statements(ast.parse(text[0]).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and [node.name] == names:
            return _parameters(node)
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            return [] if len(names) == 1 else _find_in_class(sources, module, text, node, names[1:])
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == names[0]:
                    origin = resolve_name("." * node.level + (node.module or ""), package)
                    found = find(sources, ".".join([origin, alias.name, *names[1:]]))
                    if not _is_megatron(origin):
                        found = [] if len(names) == 1 else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if [getattr(target, "id", None) for target in targets] == names:
            found = []
    return found


def _find_in_class(
    sources: Sequence[Source], module: str, text: tuple[str, bool], owner: ast.ClassDef, names: list[str]
) -> list[str] | None:
    for node in _statements(owner.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and [node.name] == names:
            return _parameters(node)
    bases = (_find_in_module(sources, module, text, [ast.unparse(base), *names]) for base in owner.bases)
    return next((base for base in bases if base is not None), None)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, and of the branches in it that may be taken when it is imported."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements(node.body)
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)
            yield from _statements([*node.orelse, *getattr(node, "finalbody", [])])


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _is_megatron(module: str) -> bool:
    return module.startswith(("megatron.core", "megatron.training", "megatron.legacy"))


def imported() -> set[str]:
    """The names that the launcher, and all of ours that it imports, takes from megatron-core."""
    names: set[str] = set()
    ours, seen = ["megatron.zero_bubble.launcher.main"], set()
    while ours:
        module = ours.pop()
        text = Source(ROOT).text(module)
        if module in seen or text is None:
            continue
        seen.add(module)
        tree = ast.parse(text[0])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                if node.module.startswith("megatron.zero_bubble"):
                    ours += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                elif _is_megatron(node.module):
                    for alias in node.names:
                        names |= _used(tree, f"{node.module}.{alias.name}", alias.asname or alias.name)
    return names


def _used(tree: ast.Module, full_name: str, local_name: str) -> set[str]:
    """The imported object; of a module, what is taken from it."""
    attributes = {
        f"{full_name}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == local_name
        if not node.attr.startswith("__")
    }
    return attributes if installed().text(full_name) is not None else {full_name}


def installed() -> Source:
    """The megatron-core that is installed."""
    return Source(Path(importlib.import_module("megatron.core").__path__[0]).parents[1])


def tables() -> list[Needed]:
    """Everything in the tables that are checked when a launch begins."""
    session = ScriptHooks(LaunchFlags(zero_bubble_post_validation=True, hierarchical_sgd="2:2"))
    return [*session.hooks(), *session.needed(), *cpu_hooks(ExitStack())]


def functions(sources: Sequence[Source]) -> Functions:
    """The functions of the tables."""
    return {name: find(sources, name) for name in sorted({needed.target for needed in tables()})}


def common_names(versions: Collection[Sequence[Source]]) -> dict[str, list[str]]:
    """What every version has in each of the modules that something is imported from."""
    modules = {name.rpartition(".")[0] for name in imported()}
    return {
        module: sorted(set.intersection(*(_names(sources, module) for sources in versions)))
        for module in sorted(modules)
    }


def _names(sources: Sequence[Source], module: str) -> set[str]:
    """What a module defines or imports from Megatron's own."""
    text = _text(sources, module)
    names: set[str] = set()
    for node in _statements(ast.parse(text[0]).body if text is not None else []):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ImportFrom) and (node.level > 0 or _is_megatron(node.module or "")):
            names |= {alias.asname or alias.name for alias in node.names}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def main(*given: str) -> None:
    versions = {}
    for version, _, kinds in (entry.partition("=") for entry in given):
        versions.setdefault(version, [])
        pattern = {"wheels": f"wheels/megatron_core-{version}-*.whl", "lm": f"lm-{version}"}[kinds]
        versions[version] += [Source(path) for path in Path().glob(pattern)]
    recorded = {
        "functions": {version: functions(sources) for version, sources in versions.items()},
        "names in all versions": common_names(versions.values()),
    }
    RECORD.write_text(_text_of(recorded) + "\n")


def _text_of(value: object) -> str:
    """JSON with a line for every function and module."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_text_of(entry)}" for key, entry in value.items()) + "\n}"


if __name__ == "__main__":
    main(*sys.argv[1:])
