"""The program `python -m megatron.zero_bubble SCRIPT ARGUMENTS`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from megatron.zero_bubble.launcher.command_line import (
    PROGRAM,
    check_script_arguments,
    complete_script_arguments,
    help_text,
    parse_command_line,
)
from megatron.zero_bubble.launcher.launch import Launch
from megatron.zero_bubble.session.reports import print_line
from megatron.zero_bubble.session.start_up import SessionError, quiet_start_up, run_program

_NAMESPACE = "megatron"
_HOME = Path(__file__).resolve().parents[3]
"""The folder that contains this package's part of the namespace package `megatron`."""


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run the script as `__main__`; `prepare_path` must be called before `run_script`."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def prepare_path(script: Path) -> None:
    """Set `sys.path` as if Python had started the script itself, and keep this package importable.

    Python puts a script's folder first on `sys.path`, but `python -m` puts the working directory first. With
    `PYTHONSAFEPATH` or `-P`, Python puts neither folder on `sys.path`. Python merges a namespace package `megatron` in
    the script's folder with this project's `megatron`. If the script's folder has a package `megatron` with an
    `__init__.py`, that package becomes `sys.modules["megatron"]`, and this project's folder is added to the `__path__`
    of that package.
    """
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path[0] = str(script.resolve().parent)
    spec = PathFinder.find_spec(_NAMESPACE, sys.path)
    if spec is not None and spec.origin is not None:
        _adopt(spec)
    elif not any(Path(part, "zero_bubble").is_dir() for part in sys.modules[_NAMESPACE].__path__):
        sys.path.append(str(_HOME))


def _adopt(spec: ModuleSpec) -> None:
    """Import the `megatron` package that the script would import, and add this project's modules to the package."""
    ours = {name: module for name, module in sys.modules.items() if name.startswith(f"{_NAMESPACE}.")}
    package = module_from_spec(spec)
    sys.modules[_NAMESPACE] = package
    assert spec.loader is not None
    spec.loader.exec_module(package)
    package.__path__.append(str(_HOME / _NAMESPACE))
    for name, module in ours.items():
        if name.count(".") == 1:
            setattr(package, name.split(".")[1], module)


def main(argv: Sequence[str]) -> int:
    """Run the script in `argv`; after a user's mistake, print a one-line error, and return status 2."""
    return run_program(PROGRAM, lambda: _launch(argv), SessionError)


def _launch(argv: Sequence[str]) -> None:
    command = parse_command_line(argv)
    flags, script = command.flags, command.script
    if command.wants_help and os.environ.get("RANK", "0") == "0":
        print_line(help_text())
    if script is None:
        return
    prepare_path(script)
    if command.wants_help or not (flags.asks_for_schedule or flags.zero_bubble_cpu):
        run_script(script, command.script_arguments)
        return
    quiet_start_up()
    arguments = complete_script_arguments(flags, command.script_arguments)
    check_script_arguments(flags, arguments, os.environ)
    launch = Launch(flags)
    try:
        run_script(script, arguments)
    except SystemExit as end:
        # Megatron-LM raises SystemExit at --exit-interval and similar flags.
        if end.code not in (None, 0):
            raise
    if launch.script_hooks is not None:
        launch.script_hooks.check_trained()
    launch.close()
