"""The faults fit the package, and the program that plants them tells which test finds one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import Fault
from tests.faults.plant import PACKAGE, ROOT, TABLE, faults_by_part, main, planted, read_table, searches

FAULTS = [fault for faults in faults_by_part().values() for fault in faults]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    """Its text is in the file once, and the file with the fault is Python."""
    text = planted(fault, ROOT / PACKAGE)
    assert text != (ROOT / PACKAGE / fault.file).read_text()
    compile(text, fault.file, "exec")


def test_names_are_unique_and_every_part_has_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len({fault.effect for fault in FAULTS}) == len(FAULTS)
    assert all(len(faults) >= 6 for faults in faults_by_part().values())


def test_a_test_finds_each_fault_of_the_table() -> None:
    """The tests that it names are there."""
    found = read_table(ROOT / TABLE)
    assert found.keys() == {fault.effect for fault in FAULTS}
    for test in found.values():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text(), test


PROGRAM = '''def double(x):
    """Twice x."""
    return 2 * x
'''
OWN = """from megatron.zero_bubble.runtime.program import double

def test_sign():
    assert double(3) > 0
"""
ABOVE = """import pytest
from megatron.zero_bubble.runtime.program import double

@pytest.mark.exhaustive
def test_value():
    assert double(3) == 6
"""
SETTINGS = "[tool.pytest.ini_options]\nmarkers = ['exhaustive']\naddopts = '-ra -m \"not exhaustive\"'\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project of one module and two tests. The one in the room above protects it."""
    project = tmp_path / "checkout"
    texts = {
        PACKAGE / "runtime/__init__.py": "",
        PACKAGE / "runtime/program.py": PROGRAM,
        "tests/faults/README.md": "",
        "tests/runtime/test_program.py": OWN,
        "tests/pipeline/test_user.py": ABOVE,
        "tests/schedule/test_below.py": "",
        "tests/end_to_end/test_training.py": "",
        "pyproject.toml": SETTINGS,
    }
    for name, text in texts.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    return project


def fault(name: str, new: str) -> Fault:
    return Fault(name, "runtime/program.py", "    return 2 * x\n", f"    return {new}\n", f"It is {name}.")


def test_tests_of_the_module_come_first_and_rooms_below_are_left_out(checkout: Path) -> None:
    runs = [arguments[0] for arguments in searches(fault("tripled", "3 * x"), checkout)]
    files = [str(Path(name).relative_to(checkout / "tests")) for name in runs]
    rooms = ["runtime", "pipeline", "end_to_end"]
    assert files == ["runtime/test_program.py"] * 2 + rooms * 2


@pytest.mark.exhaustive  # it starts pytest a dozen times
def test_the_table_has_the_test_that_finds_a_fault(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    faults = fault("tripled", "3 * x"), fault("swapped", "x * 2")
    monkeypatch.setattr("tests.faults.plant.faults_by_part", lambda: {"program": faults})
    assert main(["tripled"], checkout) == 0
    value = "tests/pipeline/test_user.py::test_value"
    assert read_table(checkout / TABLE) == {"It is tripled.": value}
    assert main([], checkout) == 1
    assert read_table(checkout / TABLE) == {"It is tripled.": value, "It is swapped.": "nothing"}
    assert (checkout / PACKAGE / "runtime/program.py").read_text() == PROGRAM, "faults are planted in a copy"
    assert [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"tripled: {value}",
        f"tripled: {value}",
        "swapped: nothing",
    ]


@pytest.mark.exhaustive  # it waits for a test that hangs
def test_a_test_that_hangs_finds_a_fault(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.faults.plant.faults_by_part", lambda: {"program": [fault("slow", "__import__('time').sleep(99)")]}
    )
    monkeypatch.setattr("tests.faults.plant.HANGS_AFTER", 5.0)
    assert main([], checkout) == 0
    assert read_table(checkout / TABLE) == {"It is slow.": "tests/runtime/test_program.py::test_sign"}


@pytest.mark.exhaustive  # it starts pytest twice
def test_a_test_that_fails_without_a_fault_finds_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.plant.faults_by_part", lambda: {"program": [fault("swapped", "x * 2")]})
    (checkout / "tests/runtime/test_program.py").write_text("def test_sign():\n    assert False\n")
    with pytest.raises(RuntimeError, match=r"^tests/runtime/test_program.py::test_sign fails without a fault, too$"):
        main([], checkout)


def test_a_fault_whose_text_is_gone_is_named(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"^gone: runtime/program.py has the text 0 times and not once$"):
        planted(Fault("gone", "runtime/program.py", "return 5", "return 6", "None."), checkout / PACKAGE)
