"""Runs the command line of the launcher in ranks of `tests.ranks`, in place of a cold start by torchrun."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tests.ranks import append_output, be_rank, close_ranks, run_on_ranks


class Ended(NamedTuple):
    """A job that has ended."""

    status: int | None
    """0 if all ranks ended with 0, and otherwise that of the first that did not. None if time ran out."""
    output: str
    errors: str


def launch(num_ranks: int, script: Path, *arguments: str) -> Ended:
    """Run `python -m megatron.zero_bubble SCRIPT ARGUMENTS` on each rank. The ranks end with the first that fails."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "output"), Path(folder, "errors")
        status = run_on_ranks(num_ranks, run_rank, ([str(script), *arguments], files, store.port), timeout=600)
        close_ranks()  # the script leaves its state in them
        return Ended(status, *(file.read_text() for file in files))


def run_rank(rank: int, num_ranks: int, argv: list[str], files: tuple[Path, Path], port: int) -> None:
    """Be one rank, as torchrun starts it, whose output and errors are appended to these files."""
    from megatron.zero_bubble.launcher.main import main

    be_rank(rank, num_ranks)
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(store)
    append_output(files)
    sys.path.insert(0, "")  # `python -m` puts the working directory there
    if status := main(argv):
        sys.exit(status)
