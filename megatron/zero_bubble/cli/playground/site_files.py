"""Writes the playground as a folder of static files, for any web server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.playground.answers import picture, point
from megatron.zero_bubble.cli.playground.pictures import facts
from megatron.zero_bubble.planner.registry import entry_of

_HERE = Path(__file__).parent
_PACKAGE = _HERE.parents[1]
_PACKED = ("schedule", "planner", "session", "cli")
"""The subpackages that the browser imports."""
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""The files of the npm package pyodide that a browser loads."""

PYODIDE = _HERE / "npm" / "node_modules" / "pyodide"
"""Folder into which `make playground` installs the npm package pyodide, which a wheel then contains."""

START: dict[str, Any] = {
    "shared": {
        "pipeline-size": "4",
        "num-microbatches": "8",
        "time-f": "10",
        "time-b": "9",
        "time-w": "7",
        "time-comm": "0.3",
    },
    "panes": [{"schedule": "1f1b"}, {"schedule": "auto", "memory-limit": "6"}],
}
"""The initial flags of the page's two schedules: the shared flags, and the flags of each schedule."""


def write_site(folder: Path, pyodide: Path) -> None:
    """Write the page, this package, Pyodide and initial drawings; raise `ValueError` if Pyodide is not installed."""
    if not all((pyodide / name).is_file() for name in RUNTIME):
        pinned = json.loads((_HERE / "npm" / "package.json").read_text(encoding="utf-8"))["dependencies"]["pyodide"]
        raise ValueError(
            f"Python for the browser is not in {pyodide}: run `make playground` in a clone, or "
            f"`npm install --prefix DIR pyodide@{pinned}` and give --pyodide DIR/node_modules/pyodide"
        )
    shutil.copytree(_HERE / "page", folder, dirs_exist_ok=True)
    (folder / "pyodide").mkdir(exist_ok=True)
    for name in RUNTIME:
        shutil.copy(pyodide / name, folder / "pyodide" / name)
    with zipfile.ZipFile(folder / "package.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _packed_files():
            archive.write(path, path.relative_to(_PACKAGE.parents[1]))
    (folder / "start.json").write_text(json.dumps(_start(), default=float), encoding="utf-8")
    _write_snapshot(folder, pyodide)


def _write_snapshot(folder: Path, pyodide: Path) -> None:
    """Let Node.js write a snapshot of Python's memory after all imports, from which Python starts in the browser.

    A copy of the snapshot is kept in Pyodide's folder, which a wheel of this package contains.
    """
    written, kept = folder / "python.snapshot", pyodide / f"snapshot-{_digest()}"
    if kept.is_file():
        shutil.copy(kept, written)
        return
    node = shutil.which("node")
    command = [node or "node", str(_HERE / "snapshot.mjs"), str(folder)]
    if node is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        reason = "there is no node" if node is None else f"{node} fails"
        print(f"the page will take seconds longer to load: {reason}, so there is no snapshot", file=sys.stderr)
        written.write_bytes(b"")
        return
    with suppress(OSError):  # if the folder cannot be written, the next call makes the snapshot again
        for old in pyodide.glob("snapshot-*"):
            old.unlink()
        new = pyodide / f"new-{os.getpid()}"
        shutil.copy(written, new)
        new.replace(kept)


def _digest() -> str:
    """Return a digest of the files on which the snapshot of Python's memory depends, except Pyodide's own files."""
    digest = hashlib.sha256()
    for path in (*_packed_files(), _HERE / "snapshot.mjs", _HERE / "page" / "python.mjs"):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _packed_files() -> list[Path]:
    return [_PACKAGE / "__init__.py", *(file for part in _PACKED for file in sorted((_PACKAGE / part).rglob("*.py")))]


def _start() -> dict[str, Any]:
    """Return the data for drawing the two initial schedules before Python has loaded in the browser."""
    shared = [f"--{name}={value}" for name, value in START["shared"].items()]
    panes = [[*shared, *(f"--{name}={value}" for name, value in pane.items())] for pane in START["panes"]]
    known = facts()
    limits = [limit * int(START["shared"]["pipeline-size"]) for limit in known["limits"]["keeping"]]
    points = [
        [point(words, limit) for limit in limits if entry_of(pane["schedule"]).uses_costs]
        for words, pane in zip(panes, START["panes"], strict=True)
    ]
    pictures = [picture(words) for words in panes]
    return {"facts": known, "state": START, "questions": panes, "pictures": pictures, "points": points}
