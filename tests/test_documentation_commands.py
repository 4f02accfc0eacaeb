"""What the documentation shows is known to work.

Commands run in `make docs-check`, or a reason says why they cannot. Examples in Python name what the package has.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import Any

import pytest

import megatron.zero_bubble as zb
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.schedule.formats import costs_from_text, schedule_from_text, units_from_json
from tests.documentation_commands import SKIPPED, commands, commands_of, fenced_blocks, pages
from tests.launch import ROOT


def test_commands_are_found_and_most_of_the_commands_own_run() -> None:
    shown = commands()
    running = [command.text for command in shown if command.reason_to_skip is None]
    assert "make pretrain" in running
    assert "make compare" in running
    assert sum(text.startswith("zero-bubble schedule") for text in running) > 8
    assert any(text.startswith("zero-bubble estimate") for text in running)
    assert all(text.split()[0] in ("make", "zero-bubble", "python", "torchrun") for text in running), running


def test_commands_in_fences_are_found() -> None:
    page = """\
```bash
make pretrain  # two minutes
zero-bubble schedule simulate \\
    --schedule zb-h1
```

    $ make compare
```python
make = 1
```
make test
"""
    shown = [(command.line, command.text) for command in commands_of(page, "page.md")]
    assert shown == [(2, "make pretrain"), (3, "zero-bubble schedule simulate --schedule zb-h1"), (7, "make compare")]


def test_every_reason_to_skip_is_needed() -> None:
    texts = [command.text for command in commands()]
    assert [pattern for pattern in SKIPPED if not any(re.search(pattern, text) for text in texts)] == []


def test_the_site_leads_to_every_page() -> None:
    """`make docs` fails where one is missing."""
    shown = {page.name for page in pages()[1:]}
    assert shown - set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == set()


def test_every_fence_has_a_language_that_is_checked() -> None:
    fences = re.findall(r"^```(\w*)\n.*?^```$", "\n".join(p.read_text() for p in pages()), re.DOTALL | re.MULTILINE)
    assert set(fences) == {"python", "json"}


def test_examples_of_files_can_be_read() -> None:
    readers = {"schedule": lambda text: schedule_from_text(text, "example"), "costs": costs_from_text}
    for _, text in fenced_blocks("json"):
        [kind] = re.findall(r'"format": "megatron-zero-bubble (\w+)"', text)
        assert readers[kind](text)
    assert units_from_json((ROOT / "docs" / "units.json").read_text())


@pytest.mark.parametrize(("page", "text"), fenced_blocks("python"))
def test_examples_in_python_name_what_the_package_has(page: str, text: str) -> None:
    """Imports are there, and what is called takes the keywords that it is given."""
    tree = ast.parse(text)
    known = {name: getattr(zb, name) for name in zb.__all__} | {"zb": zb, "pipeline": zb.Pipeline}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {str(each.asname): importlib.import_module(each.name) for each in node.names if each.asname}
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megatron.zero_bubble"):
            module = importlib.import_module(node.module)
            known |= {each.name: getattr(module, each.name) for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (function := resolved(node.func, known)) is not None:
            takes = inspect.signature(function).parameters
            keywords = {str(each.arg) for each in node.keywords} - takes.keys()
            flags = {field.removeprefix("zero_bubble_") for field in LaunchFlags.__dataclass_fields__}
            assert keywords <= (flags if function.__name__ == "enable" else set()), (page, ast.unparse(node))


def resolved(function: ast.expr, known: dict[str, Any]) -> Any:
    """Return the object of the package that an example calls, or None for anything else."""
    if isinstance(function, ast.Name):
        return known.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in known:
        return getattr(known[function.value.id], function.attr)
    return None
