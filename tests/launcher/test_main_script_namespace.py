"""A script finds what it would find without the launcher, and our package, whatever `megatron` lies beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT

LAUNCH = """
import sys
from pathlib import Path
from megatron.zero_bubble.launcher.main import prepare_path, run_script
script = Path(sys.argv[1])
prepare_path(script)
run_script(script, sys.argv[2:])
"""
"""What the launcher does for a script without our flags. `python -c` puts the working directory first, as `-m` does."""

SCRIPT = """
import sys
import helper, megatron.core, megatron.training, megatron.zero_bubble.schedule
print(megatron.core.__file__, megatron.training.__file__, helper.__file__, megatron.zero_bubble.__file__, sep="\\n")
print(__name__, sys.argv, sys.path[0])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder as Megatron-LM's, with a core and a trainer of its own."""
    folder = tmp_path / "a checkout"
    for part in ("core", "training"):
        (folder / "megatron" / part).mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").touch()
    (folder / "helper.py").touch()
    (folder / "pretrain.py").write_text(SCRIPT)
    return folder


def launch(script: Path, cwd: Path, *arguments: str) -> list[str]:
    """The lines that the script prints, started with our package found on PYTHONPATH, last of all."""
    command = [sys.executable, "-c", LAUNCH, str(script), *arguments]
    environment = {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("is_package", [False, True], ids=["namespace", "package with __init__.py"])
def test_megatron_of_the_script_and_our_package_are_both_found(
    checkout: Path, tmp_path: Path, is_package: bool
) -> None:
    if is_package:
        (checkout / "megatron" / "__init__.py").write_text("version = 3\n")
    core, training, helper, ours, state = launch(checkout / "pretrain.py", tmp_path, "--lr", "1")
    assert core == str(checkout / "megatron" / "core" / "__init__.py")
    assert training == str(checkout / "megatron" / "training" / "__init__.py")
    assert helper == str(checkout / "helper.py")
    assert ours == str(ROOT / "megatron" / "zero_bubble" / "__init__.py")
    assert state == f"__main__ {[str(checkout / 'pretrain.py'), '--lr', '1']} {checkout}"


def test_our_package_is_found_from_its_own_folder(checkout: Path) -> None:
    """A clone that is not installed is importable only because it is the working directory; that must do."""
    core, *_, ours, _ = launch(checkout / "pretrain.py", ROOT)
    assert core.startswith(str(checkout))
    assert ours.startswith(str(ROOT))


def test_a_safe_path_keeps_its_first_folder(tmp_path: Path) -> None:
    """Python then puts neither the working directory nor the folder of the script on the path."""
    script = tmp_path / "script" / "pretrain.py"
    script.parent.mkdir()
    script.write_text("import helper, megatron.zero_bubble.schedule\nprint(helper.__file__)\n")
    (tmp_path / "helper.py").touch()
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", LAUNCH, str(script)]
    result = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"{tmp_path / 'helper.py'}\n"), result.stderr


def test_without_a_core_beside_the_script_the_installed_one_is_used(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text("import importlib.util\nprint(importlib.util.find_spec('megatron.core').origin)\n")
    (origin,) = launch(script, tmp_path)
    assert "site-packages" in origin
