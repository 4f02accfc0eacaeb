"""Lists the fields of megatron-core's configuration classes and the flags of Megatron-LM, from their sources.

    python -m tools.megatron_settings names SOURCE ...    prints them as JSON
    python -m tools.megatron_settings missing SOURCE ...  prints those that the table does not classify
    python -m tools.megatron_settings page                prints docs/megatron_settings.md

A SOURCE is a checkout of Megatron-LM, a folder with an unpacked wheel of megatron-core, or a wheel. A file that several
sources have is read from the first. Nothing of them is run, so that any Python reads any version.
`tests/tools/megatron_settings` has the names of every supported version; its README.md says how they were recorded.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PARSERS = ("megatron/training/arguments.py", "megatron/post_training/arguments.py")
"""The files of Megatron-LM that add flags to the parser of `pretrain_gpt.py`."""
_PACKAGES = ("megatron/core/", "megatron/training/")
"""The folders that are searched for configuration classes."""


class SettingNames:
    """The names of the settings of one version.

    Args:
        sources: checkouts of Megatron-LM, unpacked wheels, and wheels.

    Attributes:
        fields: the fields that each configuration class adds to its bases, by the class's full name.
        flags: the name of the argument that each flag of the parser sets.
    """

    def __init__(self, sources: Sequence[Path]) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self.fields: dict[str, list[str]] = {}
        files = _files(sources)
        for name, text in sorted(files.items()):
            if name.startswith(_PACKAGES):
                self._add_classes(name, ast.parse(text))
        self.flags: dict[str, str] = {}
        for name in _PARSERS:
            if name in files:
                for function in ast.parse(files[name]).body:
                    self.flags.update(self._flags_in(function))

    def _add_classes(self, file: str, tree: ast.Module) -> None:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in tree.body:
            is_dataclass = isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            if isinstance(node, ast.ClassDef) and is_dataclass and node.name.endswith("Config"):
                self._classes.setdefault(node.name, node)
                self.fields[f"{module}.{node.name}"] = [name for name, _ in _annotations(node)]

    def _flags_in(self, function: ast.stmt) -> Iterator[tuple[str, str]]:
        lists = {
            ast.unparse(node.targets[0]): node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        }
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            called = ast.unparse(call.func).rpartition(".")[2]
            if called == "add_argument":
                flags = [ast.literal_eval(value) for value in call.args if not isinstance(value, ast.Starred)]
                dest = ast.literal_eval(named["dest"]) if "dest" in named else _dest(flags)
                yield from ((flag, dest) for flag in flags)
            elif called == "ArgumentGroupFactory":
                excluded = named.get("exclude", ast.List([]))
                without = ast.literal_eval(lists.get(ast.unparse(excluded), excluded))
                yield from self._flags_of_class(ast.unparse(call.args[0]), without)

    def _flags_of_class(self, name: str, without: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The flags that Megatron-LM's `ArgumentGroupFactory` makes of the fields of a class."""
        node = self._classes[name]
        for base in node.bases:
            if ast.unparse(base) in self._classes:
                yield from self._flags_of_class(ast.unparse(base), without)
        for field, annotation in _annotations(node):
            text = ast.unparse(annotation.value) if annotation.value is not None else ""
            if field in without or "init=False" in text:
                continue
            meta = _argparse_meta(annotation.value)
            is_on = ast.unparse(annotation.annotation) in ("bool", "Optional[bool]") and text == "True"
            prefixes = ("no-", "disable-") if is_on else ("",)
            flags = meta.get("arg_names", [f"--{prefix}{field.replace('_', '-')}" for prefix in prefixes])
            yield from ((flag, meta.get("dest", field)) for flag in flags)


def _files(sources: Sequence[Path]) -> dict[str, str]:
    """The text of every Python file of the sources below `megatron/`, by its path."""
    files: dict[str, str] = {}
    for source in sources:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                found = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
        else:
            paths = (path for package in (*_PACKAGES, "megatron/post_training/") for path in source.glob(f"{package}**/*.py"))
            found = {path.relative_to(source).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        files = {**found, **files}
    return files


def _annotations(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not line.target.id.startswith("_"):
            if "ClassVar" not in ast.unparse(line.annotation):
                yield line.target.id, line


def _argparse_meta(default: ast.expr | None) -> dict[str, object]:
    """The constants of a field's `argparse_meta`."""
    for call in ast.walk(default) if default is not None else ():
        if isinstance(call, ast.Dict):
            for key, value in zip(call.keys, call.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "argparse_meta" and isinstance(value, ast.Dict):
                    return {
                        ast.literal_eval(name): ast.literal_eval(entry)
                        for name, entry in zip(value.keys, value.values, strict=True)
                        if name is not None and ast.literal_eval(name) in ("arg_names", "dest")
                    }
    return {}


def _dest(flags: Sequence[str]) -> str:
    first = next((flag for flag in flags if flag.startswith("--")), flags[0])
    return first.lstrip("-").replace("-", "_")
