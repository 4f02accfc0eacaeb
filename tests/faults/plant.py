"""Plant single faults in a copy of the project, one at a time, and tell which test finds each.

    python -m tests.faults.plant                                    # all faults
    python -m tests.faults.plant executor strided-message-sent-as-it-is  # those of a part, and one by its name

For each fault, the test that the table of README.md names runs first. If it passes, the tests of the fault's module
run, then those of its room, of the rooms above it, and all others, until one fails or hangs: quick ones first, then
those marked exhaustive. The table then has the test that failed. The faults are the lists of `tests/faults/parts`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.faults import Fault, parts
from tests.test_architecture import LAYERS, ROOT

PACKAGE = Path("megatron") / "zero_bubble"
TABLE = Path("tests") / "faults" / "README.md"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".cache", "build", "node_modules", "__pycache__", ".*_cache")
BESIDE_THE_ROOMS = ("end_to_end", "benchmarks", "tools", "test_*.py")
"""Tests of no room, relative to `tests`. They import every room."""
QUICK, EXHAUSTIVE, ALL = ("-m", "not exhaustive"), ("-m", "exhaustive"), ("-m", "")
HANGS_AFTER = 240.0
"""Seconds without the end of a test after which it hangs."""
NOTHING = "nothing"
HEAD = """# Planted faults, and the tests that find them

`python -m tests.faults.plant` plants each fault alone and runs tests until one fails, which the table names. A fault
that was found by `nothing` needs a test. Sixteen of the tests were written for their fault, because the suite of commit
49c4103, when the faults were chosen, has none like them.
"""


def faults_by_part() -> dict[str, tuple[Fault, ...]]:
    """The faults of each part of the project."""
    names = sorted(module.name for module in pkgutil.iter_modules(parts.__path__))
    return {name: importlib.import_module(f"tests.faults.parts.{name}").FAULTS for name in names}


def planted(fault: Fault, package: Path) -> str:
    """The text of the fault's file, with the fault.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    text = (package / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has the text {text.count(fault.old)} times and not once")
    return text.replace(fault.old, fault.new)


def searches(fault: Fault, checkout: Path) -> Iterator[list[str]]:
    """Arguments of pytest for each run of tests, in the order of the runs."""
    tests, path = checkout / "tests", Path(fault.file).with_suffix("")
    room, *names = path.parts
    patterns = [f"{room}/test_{name}{end}" for name in names for end in (".py", "_*.py")]
    mirrored = sorted({str(file) for pattern in patterns for file in tests.glob(pattern)})
    if mirrored:
        yield [*mirrored, *QUICK]
        yield [*mirrored, *EXHAUSTIVE]
    for marks in (QUICK, EXHAUSTIVE):
        for pattern in (*LAYERS[LAYERS.index(room) :], *BESIDE_THE_ROOMS):
            if places := [str(place) for place in sorted(tests.glob(pattern))]:
                yield [*places, *(f"--ignore={file}" for file in mirrored), *marks]


def first_failure(arguments: Sequence[str], checkout: Path) -> str:
    """Run tests of the checkout one after the other until one fails or hangs: its name, or NOTHING."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", *arguments]
    output = checkout.parent / "output"
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and time.time() - output.stat().st_mtime < HANGS_AFTER:
            time.sleep(0.2)
    finally:
        kill_processes_of(checkout)
    status, text = process.wait(), output.read_text()
    if status in (0, 4, 5):  # 4: the test that found the fault before is gone; 5: no test was chosen
        return NOTHING
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, flags=re.MULTILINE)
    started = re.findall(r"^(tests/.*?::.*?)(?: [A-Z]+ .*| )?$", text, flags=re.MULTILINE)
    return [*failed, *started[-1:], arguments[0]][0]


def kill_processes_of(checkout: Path) -> None:
    """Kill all processes that import the package of the checkout, orphans too."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("PYTHONPATH") == str(checkout):
                process.kill()


def finder_of(fault: Fault, checkout: Path, known: str) -> str:
    """The first test that fails or hangs with the fault in the checkout: its name, or NOTHING.

    Args:
        fault: The fault. It is in the checkout only while tests run.
        checkout: A copy of the project.
        known: The test that found it before, or an empty text.
    """
    file = checkout / PACKAGE / fault.file
    whole, text = file.read_text(), planted(fault, checkout / PACKAGE)
    runs = list(searches(fault, checkout))
    if known and (checkout / known.partition("::")[0]).exists():
        runs.insert(0, [known, *ALL])
    for arguments in runs:
        file.write_text(text)
        finder = first_failure(arguments, checkout)
        file.write_text(whole)
        if finder != NOTHING:
            return finder
    return NOTHING


def read_table(table: Path) -> dict[str, str]:
    """For the effect of each fault in the table, the test that found it."""
    rows = re.findall(r"^\| (.*) \| `(.*)` \|$", table.read_text() if table.exists() else "", flags=re.MULTILINE)
    return {effect: test.replace("\\|", "|") for effect, test in rows}


def write_table(table: Path, found: dict[str, str]) -> None:
    """Write the faults with the test that found each as a page of Markdown."""
    lines = [HEAD]
    for part, faults in faults_by_part().items():
        lines += [f"## {part.replace('_', ' ').capitalize()}", "", "| fault | found by |", "|---|---|"]
        for fault in faults:
            test = found.get(fault.effect, "").replace("|", "\\|")
            lines.append(f"| {fault.effect} | {f'`{test}`' if test else ''} |")
        lines.append("")
    table.write_text("\n".join(lines))


def main(names: Sequence[str], checkout: Path = ROOT) -> int:
    """Plant the faults of `names`, or all, and write each result to the table of the checkout.

    Args:
        names: Names of faults and parts.
        checkout: The project. It is copied, and only its table is written.

    Returns:
        1 if a fault was not found, otherwise 0.

    Raises:
        RuntimeError: a test that is said to find a fault fails without it, too.
    """
    chosen = [
        fault
        for part, faults in faults_by_part().items()
        for fault in faults
        if not names or {part, fault.name}.intersection(names)
    ]
    finders = set()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(checkout, copy, ignore=NOT_COPIED, symlinks=True)
        for fault in chosen:
            began = time.monotonic()
            finder = finder_of(fault, copy, read_table(checkout / TABLE).get(fault.effect, ""))
            write_table(checkout / TABLE, read_table(checkout / TABLE) | {fault.effect: finder})
            print(f"{fault.name}: {finder} ({time.monotonic() - began:.0f} s)", flush=True)
            finders.add(finder)
        found = sorted(finders - {NOTHING})
        if found and (failed := first_failure([*found, *ALL], copy)) != NOTHING:
            raise RuntimeError(f"{failed} fails without a fault, too")
    return int(NOTHING in finders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
