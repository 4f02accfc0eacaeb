"""Fetches a wheel of megatron-core from PyPI, and unpacks it so that any Python from 3.11 on can train with it.

python tests/megatrons/unpack.py VERSION FOLDER

The wheels from 0.17 on are for Python 3.12. Their sources run on 3.11 with one name of 3.12, and with the compiled
helper of the megatron-core that is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

SITE = """\
import typing

import typing_extensions

typing.override = typing_extensions.override
"""
"""Python runs `sitecustomize.py`, if it finds one on its path, before anything else."""


def unpack(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as wheels:
        wanted = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--dest", wheels)
        quiet = ("--quiet", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "download", *quiet, *wanted, f"megatron-core=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(wheels).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    if sys.version_info < (3, 12):
        (folder / "sitecustomize.py").write_text(SITE)
        installed = find_spec("megatron.core")
        assert installed is not None
        assert installed.origin is not None
        for helper in Path(installed.origin).parent.glob("datasets/helpers_cpp.*"):
            shutil.copy(helper, folder / "megatron" / "core" / "datasets")


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]))
