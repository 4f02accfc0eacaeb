"""Lists the fields of megatron-core's configuration classes and the flags of Megatron-LM.

    python -m tools.megatron_settings names SOURCE ...    prints the names in the sources of a version
    python -m tools.megatron_settings missing SOURCE ...  prints the names that the table does not classify; ends with 1

A SOURCE is a checkout of Megatron-LM, or a wheel of megatron-core. If several sources have a file, the first source
counts. The sources are parsed but not run, so that any Python can read any version. The command `names` wrote the names
of every supported version to `tests/tools/megatron_settings`, from these sources:

    for v in 0.16.1 0.17.0 0.18.0 0.19.2; do
        pip download --no-deps --only-binary :all: --python-version 3.12 --dest wheels megatron-core==$v
    done
    for v in 0.16.1 0.17.0 0.18.2 0.19.0; do
        git clone --depth 1 --branch core_v$v https://github.com/NVIDIA/Megatron-LM lm-$v
    done
    git clone --depth 1 https://github.com/NVIDIA/Megatron-LM lm-main

The wheel of 0.16.1 does not contain Megatron-LM's parser, and no wheel contains the flags of ModelOpt. Therefore the
second source of each version is a checkout of the nearest tag.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.setting_groups import CLASSES_WITHOUT_EFFECT, effects

RECORDS = Path(__file__).parents[1] / "tests" / "tools" / "megatron_settings"
_PARSERS = ("megatron/training/arguments.py", "megatron/post_training/arguments.py")
"""Files of Megatron-LM that add flags to the parser of `pretrain_gpt.py`."""
_PACKAGES = ("megatron/core/", "megatron/training/")
"""The folders that are searched for configuration classes."""


class SettingNames:
    """The names of the settings of one version.

    Attributes:
        fields: full name of a configuration class -> fields that the class adds to the fields of its base classes.
        flags: flag of the parser -> name of the argument that the flag sets.
    """

    def __init__(self, fields: Mapping[str, Sequence[str]], flags: Mapping[str, str]) -> None:
        self.fields, self.flags = fields, flags

    @classmethod
    def of(cls, sources: Sequence[Path]) -> SettingNames:
        """Read the names from checkouts of Megatron-LM and from wheels."""
        reader = _Reader(sources)
        return cls(reader.fields, reader.flags)

    @classmethod
    def parse(cls, text: str) -> SettingNames:
        """Read the names from `text`, which is a `str(names)`."""
        fields: dict[str, list[str]] = {}
        for line in text.splitlines():
            if line.startswith("["):
                of_class = fields.setdefault(line[1:-1], [])
            else:
                of_class += line.split()
        flags = {flag: dest or _dest([flag]) for flag, _, dest in (each.partition("=") for each in fields.pop("flags"))}
        return cls(fields, flags)

    def __str__(self) -> str:
        flags = [flag if dest == _dest([flag]) else f"{flag}={dest}" for flag, dest in self.flags.items()]
        sections = {**dict(sorted(self.fields.items())), "flags": flags}
        wrap = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
        return "\n".join(f"[{name}]\n{wrap.fill(' '.join(names))}" for name, names in sections.items()) + "\n"

    @property
    def settings(self) -> list[str]:
        """The settings that the table of settings has to classify."""
        fields = (names for name, names in self.fields.items() if not name.startswith(CLASSES_WITHOUT_EFFECT))
        return sorted({*(name for names in fields for name in names), *self.flags.values()})

    def missing(self) -> list[str]:
        """The settings that the table of settings does not classify."""
        classified = {name for name, _ in effects()}
        return [name for name in self.settings if name not in classified]


class _Reader:
    """Reads the names of settings from Megatron's sources."""

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
                if "action" in named and "BooleanOptionalAction" in ast.unparse(named["action"]):
                    flags += [flag.replace("--", "--no-", 1) for flag in flags]
                yield from ((flag, dest) for flag in flags)
            elif called == "ArgumentGroupFactory":
                excluded = named.get("exclude", ast.List([]))
                without = ast.literal_eval(lists.get(ast.unparse(excluded), excluded))
                yield from self._flags_of_class(ast.unparse(call.args[0]), without)

    def _flags_of_class(self, name: str, without: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield (flag, name of its argument) for all flags that `ArgumentGroupFactory` makes from a class's fields."""
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
    """Path -> text of every Python file of the sources below `megatron/`."""
    files: dict[str, str] = {}
    for source in sources:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                found = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
        else:
            folders = (*_PACKAGES, "megatron/post_training/")
            paths = (path for folder in folders for path in source.glob(f"{folder}**/*.py"))
            found = {path.relative_to(source).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        files = {**found, **files}
    return files


def _annotations(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if not line.target.id.startswith("_") and "ClassVar" not in ast.unparse(line.annotation):
            yield line.target.id, line


def _argparse_meta(default: ast.expr | None) -> dict[str, Any]:
    """Name -> value of the constants in a field's `argparse_meta`."""
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


def recorded() -> dict[str, SettingNames]:
    """Version -> names of the settings, for every supported version from the oldest."""
    files = sorted(RECORDS.glob("*.txt"), key=lambda file: [int(part) for part in file.stem.split(".")])
    return {file.stem: SettingNames.parse(file.read_text()) for file in files}


def main(command: str = "", *given: str) -> int:
    if command not in ("names", "missing") or not given:
        print(__doc__, file=sys.stderr)
        return 2
    names = SettingNames.of([Path(source) for source in given])
    if not names.flags:
        print(f"there is no {_PARSERS[0]} in {' '.join(given)}", file=sys.stderr)
        return 2
    if command == "names":
        print(names, end="")
        return 0
    missing = names.missing()
    for name in missing:
        print(name)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
