"""The functions of megatron-core and Megatron-LM that the launcher relies on, as the supported versions have them.

They are recorded in `megatron_functions.json`, because the versions cannot all be installed beside each other, and read
from the sources without running them. To record a version, or all of them after something new is relied on:

    pip download --no-deps --only-binary :all: --python-version 3.12 --dest wheels megatron-core==0.19.0
    git clone --depth 1 --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM megatron-lm-0.19.0
    python -m tests.launcher.megatron_functions 0.19.0 wheels/megatron_core-0.19.0-*.whl megatron-lm-0.19.0

What the wheel has is read from it, the rest from the checkout: the wheel of 0.16 has no megatron.training. Of 0.20,
which is not released, there is a checkout only.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import resolve_name
from pathlib import Path

from megatron.zero_bubble.launcher.flags import LaunchFlags
from megatron.zero_bubble.launcher.hooks import Needed
from megatron.zero_bubble.launcher.session import Session, cpu_hooks

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
Record = dict[str, "list[str] | bool | None"]
"""By full name: the parameters of a function that a table names, whether there is what is imported; None if not."""


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
        text = next((text for text in (source.text(module) for source in sources) if text is not None), None)
        if text is not None:
            return _find_in_module(sources, module, text, words[count:])
    return None


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
    """What the launcher, and all of ours that it imports, takes from megatron-core by name."""
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
    session = Session(LaunchFlags(zero_bubble_post_validation=True))
    return [*session.hooks(), *session.needed(), *cpu_hooks()]


def record(sources: Sequence[Source]) -> Record:
    """What the version has whose sources these are; the first one that has a module is read."""
    found: Record = {name: None if find(sources, name) is None else True for name in imported()}
    found |= {needed.target: find(sources, needed.target) for needed in tables()}
    return dict(sorted(found.items()))


def main(version: str, *paths: str) -> None:
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    recorded[version] = record([Source(Path(path)) for path in paths])
    versions = [f"{json.dumps(key)}: {_one_name_a_line(names)}" for key, names in sorted(recorded.items())]
    RECORD.write_text("{\n" + ",\n".join(versions) + "\n}\n")


def _one_name_a_line(names: Record) -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in names.items())
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    main(*sys.argv[1:])
