"""Records which functions of the package each test reaches, also in the processes that it starts.

Python imports this module at its start wherever this folder is on PYTHONPATH. While REACHED_FUNCTIONS names a file,
every function of `megatron/zero_bubble` is compiled with one more expression, which at the function's first call adds
the line `TEST <tab> FUNCTION` to that file: `tests/runtime/test_executor.py::test_x	runtime/executor.Executor.run`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.machinery
import os
from typing import Any

PACKAGE = "/megatron/zero_bubble/"
RECORD = os.environ.get("REACHED_FUNCTIONS")


class Recording(ast.NodeTransformer):
    """Adds the expression to every function of a module."""

    def __init__(self, module: str) -> None:
        self._path = [module]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self._path.append(node.name)
        self.generic_visit(node)
        name = repr(".".join(self._path))
        self._path.pop()
        [reach] = ast.parse(f"{name} in __reached__ or __reach__({name})").body
        node.body.insert(int(ast.get_docstring(node) is not None), reach)
        return node


def install(record: str) -> None:
    reached: set[str] = set()

    def reach(name: str) -> None:
        reached.add(name)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        with contextlib.suppress(OSError):  # tests limit the files and the disk of a process
            file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(file, f"{test}\t{name}\n".encode())
            os.close(file)

    vars(builtins).update(__reached__=reached, __reach__=reach)
    os.register_at_fork(after_in_child=reached.clear)
    compiled = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, *more: Any, **options: Any) -> Any:
        _, found, module = str(path).partition(PACKAGE)
        if found:
            tree = Recording(module.removesuffix(".py")).visit(ast.parse(data, path))
            data = ast.fix_missing_locations(tree)
        return compiled(self, data, path, *more, **options)

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Begin a test's record anew, and name the test in the file STARTED_TESTS. The module is a plugin of pytest."""
    getattr(builtins, "__reached__", set()).clear()
    if started := os.environ.get("STARTED_TESTS"):
        with open(started, "a") as file:
            file.write(f"{nodeid}\n")


if RECORD:
    install(RECORD)
