"""Plant single faults in a copy of the project, one at a time, and tell which test finds each.

    python -m tests.faults.plant record --record build/reached        # all tests once: which functions each reaches
    python -m tests.faults.plant plant --record build/reached --results build/found.json
    python -m tests.faults.plant table before=build/old.json after=build/found.json > tests/faults/README.md

`plant` runs, for each fault, the tests that reach the function with the fault, quickest files first, until one fails
or hangs. A fault that is in `--results` already is left out, so that a run that was cut short goes on. The faults are
the lists of `tests/faults/parts`. `--checkout` names another checkout of the project whose tests are to be measured.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import psutil

from tests.faults import Fault, parts

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = Path("megatron") / "zero_bubble"
RECORDER = ROOT / "tests" / "faults" / "recorder"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".cache", "build", "node_modules", "__pycache__", ".*_cache")
HANGS_AFTER = 180.0
"""Seconds without the end of a test after which it hangs, beside ten times the time that it takes without a fault."""
QUICK = 1.0
"""Tests that take fewer seconds than this run before all others."""
NOTHING = "nothing"


class Record(NamedTuple):
    """A record of the tests of a checkout."""

    reaching: dict[str, set[str]]
    """For each function, such as `runtime/executor.Executor.run`, the tests that reach it."""
    seconds: dict[str, float]


def faults_by_part() -> dict[str, tuple[Fault, ...]]:
    """The faults of each part of the project."""
    names = sorted(module.name for module in pkgutil.iter_modules(parts.__path__))
    return {name: importlib.import_module(f"tests.faults.parts.{name}").FAULTS for name in names}


def environment(checkout: Path, **more: str) -> dict[str, str]:
    """The processes of a test import the package of `checkout`, and record if `more` says where."""
    path = os.pathsep.join([str(RECORDER), str(checkout)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def record(checkout: Path, folder: Path, words: Sequence[str]) -> int:
    """Run all tests of `checkout`, or those that pytest's `words` choose, and write the record to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(prefix="recorded-")) / "project"
    shutil.copytree(checkout, copy, ignore=NOT_COPIED, symlinks=True)
    reached, report = folder.resolve() / "reached.tsv", folder.resolve() / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "sitecustomize", "-q", f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", "--numprocesses", "2", "--dist", "loadfile", "-m", "", *words]
    status = subprocess.run(command, cwd=copy, env=environment(copy, REACHED_FUNCTIONS=str(reached))).returncode
    shutil.rmtree(copy.parent)
    return status


def read_record(folder: Path) -> Record:
    """Read what `record` has written: all its `.tsv` files of functions reached, and all its reports of pytest."""
    reaching: dict[str, set[str]] = {}
    for file in folder.glob("*.tsv"):
        for line in file.read_text().splitlines():
            test, _, function = line.partition("\t")
            if test:
                reaching.setdefault(function, set()).add(test)
    seconds: dict[str, float] = {}
    for report in folder.glob("*.xml"):
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('file')}::{case.get('name')}"
            seconds[name] = seconds.get(name, 0.0) + float(case.get("time", "0"))
    return Record(reaching, seconds)


def planted(fault: Fault, package: Path) -> str:
    """The text of the fault's file, with the fault.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    text = (package / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has the text {text.count(fault.old)} times and not once")
    return text.replace(fault.old, fault.new)


def function_with(fault: Fault, package: Path) -> str:
    """The innermost function with the fault, or the file if it is in none."""
    text = (package / fault.file).read_text()
    lines = text[: text.index(fault.old)].count("\n") + 1
    # Lines of the text that are equal before and after do not tell where the fault is.
    old, new = fault.old.splitlines(), fault.new.splitlines()
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)) - 1)
    place, found = lines + same, fault.file.removesuffix(".py")

    def descend(node: ast.AST, name: str) -> None:
        nonlocal found
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = f"{name}.{child.name}"
                if isinstance(child, ast.FunctionDef) and child.lineno <= place <= (child.end_lineno or 0):
                    found = inner
            descend(child, inner)

    descend(ast.parse(text), found)
    return found


def candidates(function: str, known: Record) -> list[str]:
    """The tests that reach the function, file by file: those of its module first, then those whose tests are quick."""
    reaching = known.reaching.get(function)
    if reaching is None:  # code of a module or class body: every test that reaches a function of the file
        reaching = set().union(*(tests for name, tests in known.reaching.items() if name.startswith(f"{function}.")))
    files: dict[str, list[str]] = {}
    for test in reaching:
        files.setdefault(test.partition("::")[0], []).append(test)
    cost = {file: sum(known.seconds.get(test, 1.0) for test in of_file) for file, of_file in files.items()}
    module = function.partition(".")[0].rpartition("/")[2]
    order = sorted(files, key=lambda file: (not file.rpartition("/")[2].startswith(f"test_{module}"), cost[file]))
    return [test for file in order for test in sorted(files[file])]


def run_tests(chosen: Sequence[str], copy: Path, seconds: dict[str, float]) -> str:
    """Run tests one after the other until one fails or hangs: its name, or NOTHING."""
    started, output = copy / "started", copy / "output"
    started.write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "sitecustomize", "-x", "-q", "--tb=no", "-m", "", *chosen]
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment(copy, STARTED_TESTS=str(started)),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        test, since = "", time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            latest = started.read_text().rpartition("\n")[0].rpartition("\n")[2]
            if latest != test:
                test, since = latest, time.monotonic()
            if time.monotonic() - since > HANGS_AFTER + 10 * seconds.get(test, 10.0):
                return f"{test} (hangs)"
    finally:
        end_session(process)
    text = output.read_text()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with status {process.returncode}: {text[-2000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, flags=re.MULTILINE)
    return failed[0] if failed else NOTHING


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it has started."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def plant(checkout: Path, known: Record, results: Path, names: Sequence[str]) -> int:
    """Plant each fault in a copy of `checkout`, and add to the file `results` which test finds it."""
    found: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
    copy = Path(tempfile.mkdtemp(prefix="planted-")) / "project"
    shutil.copytree(checkout, copy, ignore=NOT_COPIED, symlinks=True)
    package = copy / PACKAGE
    for part, faults in faults_by_part().items():
        for fault in faults:
            if fault.name in found or (names and not {part, fault.name} & {*names}):
                continue
            text = planted(fault, package)
            chosen = candidates(function_with(fault, package), known)
            began, whole = time.monotonic(), (package / fault.file).read_text()
            (package / fault.file).write_text(text)
            finder, quick = NOTHING, {test for test in chosen if known.seconds.get(test, 1.0) < QUICK}
            for turn in ([test for test in chosen if test in quick], [test for test in chosen if test not in quick]):
                if finder == NOTHING and turn:
                    finder = run_tests(turn, copy, known.seconds)
            (package / fault.file).write_text(whole)
            # Another run may have added its own meanwhile.
            found = {**(json.loads(results.read_text()) if results.exists() else {}), fault.name: finder}
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            print(f"{part}: {fault.name}: {finder} ({time.monotonic() - began:.0f} s, {len(chosen)} tests)", flush=True)
    shutil.rmtree(copy.parent)
    return 0


def table(columns: dict[str, dict[str, str]]) -> str:
    """The faults and, for each of the columns, the test that finds each, as a page of Markdown."""
    lines = [
        "# Planted faults, and the tests that find them",
        "",
        "`python -m tests.faults.plant` plants each fault alone and runs the tests that reach its function, the",
        "quickest files first; a cell names the first test that fails, and an empty one says that it was not tried.",
        "Files are relative to `tests`.",
    ]
    for part, faults in faults_by_part().items():
        lines += ["", f"## {part.replace('_', ' ').capitalize()}", "", f"| fault | {' | '.join(columns)} |"]
        lines += [f"|---|{'---|' * len(columns)}"]
        for fault in faults:
            cells = [found.get(fault.name, "").removeprefix("tests/").replace("|", "\\|") for found in columns.values()]
            lines.append(f"| {fault.effect} | {' | '.join(f'`{cell}`' if cell else '' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "plant"):
        command = commands.add_parser(name)
        command.add_argument("--checkout", type=Path, default=ROOT, help="the checkout (default: this one)")
        command.add_argument("--record", type=Path, required=True, help="folder of the record")
        command.add_argument("words", nargs="*", help="words for pytest, or names of faults and parts (default: all)")
    command.add_argument("--results", type=Path, required=True, help="JSON file: for each fault the test that finds it")
    command = commands.add_parser("table")
    command.add_argument("columns", nargs="+", metavar="TITLE=RESULTS")
    arguments = parser.parse_args(argv)
    if arguments.command == "record":
        return record(arguments.checkout.resolve(), arguments.record, arguments.words)
    if arguments.command == "plant":
        known = read_record(arguments.record)
        return plant(arguments.checkout.resolve(), known, arguments.results, arguments.words)
    columns = dict(word.split("=", 1) for word in arguments.columns)
    print(table({title: json.loads(Path(file).read_text()) for title, file in columns.items()}), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
