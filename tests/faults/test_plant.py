"""The faults fit the package, and the program that plants them tells which test finds one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import Fault
from tests.faults.plant import PACKAGE, ROOT, Record, candidates, faults_by_part, function_with, main, planted, table

FAULTS = [fault for faults in faults_by_part().values() for fault in faults]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    """Its text is in the file once, and the file with the fault is Python."""
    text = planted(fault, ROOT / PACKAGE)
    assert text != (ROOT / PACKAGE / fault.file).read_text()
    compile(text, fault.file, "exec")


def test_names_are_unique_and_every_part_has_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(len(faults) >= 6 for faults in faults_by_part().values())


PROGRAM = '''def double(x):
    """Twice x."""
    return 2 * x


def quadruple(x):
    return double(double(x))
'''
TESTS = """from megatron.zero_bubble.program import quadruple


def test_sign():
    assert quadruple(3) > 0


def test_value():
    assert quadruple(3) == 12
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project of one module and two tests, one of which protects it."""
    project = tmp_path / "checkout"
    package = project / PACKAGE
    package.mkdir(parents=True)
    (project / "tests").mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROGRAM)
    (project / "tests" / "test_program.py").write_text(TESTS)
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-ra'\n")
    return project


@pytest.mark.exhaustive  # it records and runs a suite of its own
def test_the_record_leads_to_the_test_that_finds_a_fault(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    found, missed = (
        Fault(name, "program.py", "    return 2 * x\n", new, "Doubles.")
        for name, new in (("tripled", "    return 3 * x\n"), ("swapped", "    return x * 2\n"))
    )
    monkeypatch.setattr("tests.faults.plant.faults_by_part", lambda: {"program": (found, missed)})
    assert function_with(found, checkout / PACKAGE) == "program.double"
    folder, results = str(tmp_path / "record"), tmp_path / "results.json"
    assert main(["record", "--checkout", str(checkout), "--record", folder]) == 0
    arguments = ["plant", "--checkout", str(checkout), "--record", folder, "--results", str(results)]
    assert main(arguments) == 0
    assert json.loads(results.read_text()) == {"swapped": "nothing", "tripled": "tests/test_program.py::test_value"}
    assert (checkout / PACKAGE / "program.py").read_text() == PROGRAM, "faults are planted in a copy"
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out == "", "what is known is not tried again"
    assert main(["table", f"before={results}", f"after={results}"]) == 0
    assert "| Doubles. | `test_program.py::test_value` | `test_program.py::test_value` |" in capsys.readouterr().out


def test_quick_files_come_first_and_code_of_a_class_is_reached_by_its_file() -> None:
    known = Record(
        {"a.f": {"tests/slow.py::x", "tests/quick.py::y"}, "a.C.g": {"tests/quick.py::z"}},
        {"tests/slow.py::x": 9.0, "tests/quick.py::y": 1.0, "tests/quick.py::z": 1.0},
    )
    assert candidates("a.f", known) == ["tests/quick.py::y", "tests/slow.py::x"]
    assert candidates("a", known) == ["tests/quick.py::y", "tests/quick.py::z", "tests/slow.py::x"]


def test_a_fault_whose_text_is_gone_is_named(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"^gone: program.py has the text 0 times and not once$"):
        planted(Fault("gone", "program.py", "return 5", "return 6", "None."), checkout / PACKAGE)


def test_the_table_has_a_row_for_each_fault() -> None:
    lines = table({"found by": {FAULTS[0].name: "tests/x.py::y"}}).splitlines()
    assert sum(line.startswith("| ") and not line.startswith("| fault") for line in lines) == len(FAULTS)
