"""The wheel alone gives the commands and the launcher, wherever they are called."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.playground.site_files import PYODIDE, RUNTIME
from tests.launch import ROOT, TINY_GPT

METADATA = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
SCRIPT = """\
import sys
import megatron.zero_bubble
print("script runs with", sys.argv[1:], megatron.zero_bubble.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents and its command, made without a network from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "installed"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "megatron", *METADATA],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in tracked.stdout.split():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    # As after `make playground`: the wheel carries Python for the browser.
    pyodide = source / PYODIDE.relative_to(ROOT)
    pyodide.mkdir(parents=True)
    for name in RUNTIME:
        (pyodide / name).write_text(name)
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    with zipfile.ZipFile(folder / built.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(target)
    return target


def run(installed: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run where nothing of the clone can be imported: only the wheel and other people's packages."""
    code = f"import sys; sys.path[:] = [p for p in sys.path if p not in ({str(ROOT)!r}, '')]\n"
    (cwd / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(cwd), str(installed)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def entry_point(installed: Path) -> tuple[str, ...]:
    """Arguments of python that run what the wheel's metadata says of the console script `zero-bubble`."""
    [file] = installed.glob("*.dist-info/entry_points.txt")
    _, target = next(line for line in file.read_text().splitlines() if line.startswith("zero-bubble")).split(" = ")
    module, function = target.split(":")
    return "-c", f"import sys; from {module} import {function} as main; sys.exit(main())"


@pytest.mark.exhaustive  # test_main_help.py and the launcher's tests run the same commands from the checkout
def test_the_wheel_alone_has_the_commands_and_the_launcher(installed, tmp_path):
    command = entry_point(installed)
    help_page = run(installed, *command, "--help", cwd=tmp_path)
    assert (help_page.returncode, help_page.stderr) == (0, "")
    for name in ("schedule", "estimate", "benchmark", "check", "playground"):
        assert f"\n  {name} " in help_page.stdout
        result = run(installed, *command, name, "--help", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert f"zero-bubble {name} " in result.stdout
    size = ("--schedule", "zb-h1", "--pipeline-size", "2", "--num-microbatches", "4")
    drawn = run(installed, *command, "schedule", "draw", *size, "--output", "picture.html", cwd=tmp_path)
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert "<svg" in (tmp_path / "picture.html").read_text()
    page = run(installed, *command, "playground", "--output", "site", cwd=tmp_path)
    # This Python for the browser cannot be started, to prepare its memory.
    [line] = page.stderr.splitlines()
    assert page.returncode == 0
    assert line.startswith("the page will take seconds longer to load: ")
    assert {"index.html", "main.js", "package.zip", "pyodide"} < {path.name for path in (tmp_path / "site").iterdir()}
    job = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "4")
    told = run(
        installed, *command, "estimate", "--world-size", "2", "--schedule", "1f1b", "--", *TINY_GPT, *job, cwd=tmp_path
    )
    assert told.returncode == 0, told.stderr
    assert "\n1f1b " in told.stdout
    (tmp_path / "script.py").write_text(SCRIPT)
    launched = run(installed, "-m", "megatron.zero_bubble", "script.py", "--train-iters", "3", cwd=tmp_path)
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert f"script runs with ['--train-iters', '3'] {installed}" in launched.stdout


def test_every_module_and_file_of_data_is_in_the_wheel(installed):
    package = ROOT / "megatron" / "zero_bubble"
    names = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and not {"__pycache__", "node_modules"} & set(path.parts)
    }
    packed = {path.relative_to(installed).as_posix() for path in (installed / "megatron").rglob("*") if path.is_file()}
    assert names == {name for name in packed if "__pycache__" not in name and "node_modules" not in name}
    assert "megatron/zero_bubble/py.typed" in packed
    assert not (installed / "megatron" / "__init__.py").exists()
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"megatron"}
