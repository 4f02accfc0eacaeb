"""The part of the check of a GPU that starts ranks, on a CPU; what a GPU would answer is stood in for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zero_bubble.cli.check import rank_check
from megatron.zero_bubble.cli.check.host_collectives import stage_collectives
from megatron.zero_bubble.cli.check.matrix import REFERENCE, cells, chosen, names
from megatron.zero_bubble.cli.check.rank_check import RankCheck, find_difference
from megatron.zero_bubble.cli.check.rank_jobs import Backend, Ended, RankStart
from tests.changes import Change, Run
from tests.launch import ROOT
from tests.trainings import run_trainings

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tries the check where there is no CUDA")

PRESENT = (
    *("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *(
        "filelock",
        "fsspec",
        "numpy",
        "numpy.libs",
        "packaging",
        "yaml",
        "_yaml",
        "setuptools",
        "_distutils_hack",
        "psutil",
    ),
)
"""The packages of a container with torch. It has nothing of ours or of `[dev]`; megatron-core is brought to it."""


def run_in_a_container(folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Run the check from a clone with the packages of a container; return its status, its JSON and its output."""
    installed = Path(sysconfig.get_paths()["purelib"])
    if not (installed / "torch").exists():
        installed = Path(torch.__file__).parents[1]
    packages, core = folder / "packages", folder / "core" / "megatron"
    for place in (packages, core):
        place.mkdir(parents=True)
    for name in PRESENT:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    (core / "core").symlink_to(installed / "megatron" / "core")
    output = folder / "found.json"
    command = [
        *(sys._base_executable, "-m", "megatron.zero_bubble.cli", "check", "--device", "cpu", "--size", "tiny"),
        *("--only", "ranks", "--output", str(output), *flags),
    ]
    result = subprocess.run(
        command,
        env={
            "PYTHONPATH": os.pathsep.join(map(str, (packages, core.parent, ROOT))),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert output.exists(), result.stdout[-3000:] + result.stderr[-3000:]
    return result.returncode, json.loads(output.read_text()), result.stdout


def verdicts(found: dict[str, Any]) -> dict[tuple[str, str], str]:
    """The verdict on each training, by its backend and its name."""
    trainings = found["ranks"]["trainings"]
    return {(one["backend"], f"{one['layout']}: {one['cell']}"): one["verdict"] for one in trainings}


@pytest.mark.exhaustive  # test_numerics.py compares the schedule of this layout, the tests below start other ranks
def test_ranks_over_gloo_and_through_host_memory_equal_megatron_core(tmp_path):
    """One layout is checked by the command, from a clone where nothing of ours is installed."""
    status, found, printed = run_in_a_container(tmp_path, "--cell", "interleaved-zb")
    expected = {f"{OF_THE_COMMAND}: {REFERENCE}": "reference", f"{OF_THE_COMMAND}: interleaved-zb": "equal"}
    assert verdicts(found) == {
        (backend, title): verdict for backend in ("gloo", "host") for title, verdict in expected.items()
    }, found
    assert status == 0
    assert printed.splitlines()[-1].endswith("found.json")


class Staged(Change):
    """All collectives go through copies in host memory."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        undo = stage_collectives("cpu")
        try:
            yield
        finally:
            undo()


def run_on_forked_ranks(start: RankStart, trainings: dict[str, Any]) -> dict[str, Ended]:
    """Stands in for `RankStart.run`, whose ranks take long to start."""
    staged = [Staged()] if start.backend.name == "host" else []
    words = {title: [*flags, *staged] for title, flags in trainings.items()}
    run_trainings(start.num_ranks, words, start.folder, unlogged=words)
    return dict.fromkeys(trainings, Ended(0.0))


OF_THE_COMMAND = "PP4, two chunks a rank"
"""The layout that is checked by the command itself, over gloo and through host memory."""
OVER_GLOO = (
    *("PP4", "PP2 x TP2", "PP2 x DP2, overlapped", "PP2 x EP2, two chunks a rank", "PP4, shards", "PP4, documents"),
    "PP4 from a checkpoint",
)
THROUGH_HOST_MEMORY = ("PP2 x TP2", "PP2 x DP2, overlapped")
"""Layouts whose collectives carry tensors; a pipeline's messages are in the layout of the command."""


@pytest.mark.exhaustive  # the schedules and layouts of test_numerics.py and test_parallelism.py
@pytest.mark.parametrize(("backend", "layouts"), [("gloo", OVER_GLOO), ("host", THROUGH_HOST_MEMORY)])
def test_the_matrix_equals_megatron_core(backend: str, layouts: tuple[str, ...], tmp_path, monkeypatch):
    """With the layout of the command each training of the matrix runs over gloo once."""
    monkeypatch.setattr(RankStart, "run", run_on_forked_ranks)
    monkeypatch.setattr(RankCheck, "_backends", lambda check: ([Backend(backend)], {}))
    trainings = [cell for cell in cells("tiny", tmp_path) if cell.layout in layouts]
    found = RankCheck(False, tmp_path, 60.0).run(trainings)
    verdicts = [(result.layout, result.cell, result.verdict) for result in found.results]
    others = {REFERENCE: "reference", "checkpoint": "made"}
    assert verdicts == [(cell.layout, cell.name, others.get(cell.name, "equal")) for cell in trainings]
    assert found.passed


def test_the_matrix_is_the_one_that_is_promised():
    ours = {"zb-h1", "zb-2p", "auto", "post-validation", "recomputation", "interleaved-zb", "zb-v"}
    ours |= {"pairs", "shards", "documents"}
    assert set(names()) == ours | {"copies"}
    of_engine = cells("tiny", Path("folder"), "transformer_engine")
    assert {cell.name for cell in of_engine if cell.is_ours} == ours
    assert {"PP2 x EP2, grouped experts", "PP4, fp8"} < {cell.layout for cell in of_engine}
    everything = cells("tiny", Path("folder"))
    for trainings in (everything, of_engine):
        assert len({cell.title for cell in trainings}) == len(trainings)
        for layout in {cell.layout for cell in trainings}:
            assert [cell.name for cell in trainings if cell.layout == layout].count(REFERENCE) == 1
    assert [cell.name for cell in chosen(everything, ["zb-v"])] == ["checkpoint", REFERENCE, "zb-v"]
    assert chosen(everything, []) == everything
    assert {cell.layout for cell in everything} == {OF_THE_COMMAND, *OVER_GLOO} > {*THROUGH_HOST_MEMORY}, "tested above"


class Ranks:
    """Stands in for the processes of a GPU: what they write is made up."""

    def __init__(self, refuses_nccl: bool = False, **faults: Any) -> None:
        self.started: list[str] = []
        self._refuses_nccl, self._faults = refuses_nccl, faults

    def run(self, start: RankStart, trainings: dict[str, Any]) -> dict[str, Ended]:
        self.started.append(start.backend.title)
        ended = {}
        for title, flags in trainings.items():
            fault = self._faults.get(title.split(": ")[-1].replace("-", "_"))
            if flags is None:
                ended[title] = Ended(1.0, "Duplicate GPU detected" if self._refuses_nccl else None)
                continue
            lines = [{"iteration": i, "lm_loss": float(i).hex(), "grad_norm": "1", "parameters": ["a"]} for i in (1, 2)]
            if fault == "differs":
                lines[1]["grad_norm"] = "2"
            Path(flags[flags.index("--log-numerics") + 1]).write_text(
                "".join(f"{json.dumps(line)}\n" for line in lines)
            )
            ended[title] = Ended(1.0, "out of order", "rank 0: ...") if fault == "fails" else Ended(1.0)
        return ended


def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks, *, has_cuda: bool) -> rank_check.RankFindings:
    monkeypatch.setattr(RankStart, "run", lambda start, trainings: ranks.run(start, trainings))
    monkeypatch.setattr(rank_check, "write_corpus", lambda prefix: None)
    one = RankCheck(has_cuda, tmp_path, 1.0)
    return one.run(cells("tiny", tmp_path))


def test_on_a_gpu_nccl_and_host_memory_are_tried_with_all_queues_and_with_one(tmp_path, monkeypatch):
    ranks = Ranks()
    found = check(tmp_path, monkeypatch, ranks, has_cuda=True)
    assert ranks.started == ["nccl", "nccl", "nccl, one queue", "host", "host, one queue"]
    assert found.passed
    of_documents = {result.backend for result in found.results if result.cell == "documents"}
    assert of_documents == {"nccl", "host", "host, one queue"}, "varying shapes need several queues"
    of_shards = {result.backend for result in found.results if result.cell == "shards"}
    assert of_shards == {"nccl", "nccl, one queue"}, "the collectives of shards run over NCCL"
    [row] = [line for line in found.as_text(markdown=False).splitlines() if line.startswith("documents")]
    assert "not run" in row
    assert found.refused == {}


def test_where_nccl_refuses_the_matrix_runs_through_host_memory(tmp_path, monkeypatch):
    ranks = Ranks(refuses_nccl=True)
    found = check(tmp_path, monkeypatch, ranks, has_cuda=True)
    assert ranks.started == ["nccl", "host", "host, one queue"]
    assert found.passed, "what NCCL cannot do is no fault of ours"
    assert "nccl cannot connect the ranks: Duplicate GPU detected" in found.as_text(markdown=False)


def test_what_differs_and_what_fails_is_told_and_the_rest_judged(tmp_path, monkeypatch):
    found = check(tmp_path, monkeypatch, Ranks(zb_2p="differs", auto="fails", zb_v="differs"), has_cuda=False)
    by_name = {(result.backend, result.cell): result for result in found.results if result.layout.startswith("PP4")}
    assert not found.passed
    assert by_name["gloo", "zb-2p"].detail == "from iteration 2: grad_norm"
    assert (by_name["host", "auto"].verdict, by_name["host", "auto"].log) == ("failed", "rank 0: ...")
    assert by_name["gloo", "zb-v"].verdict == "equal", "in a V the norm may be summed in another order"
    assert by_name["gloo", "zb-h1"].verdict == "equal"
    text = found.as_text(markdown=False)
    assert "gloo, PP4, zb-2p: differs: from iteration 2: grad_norm" in text
    assert "gloo, PP4, auto: failed: out of order" in text


def test_rounded_losses_may_differ_a_little(tmp_path):
    def numerics(name: str, loss: float) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"iteration": 1, "lm_loss": loss.hex(), "grad_norm": name}) + "\n")
        return path

    expected = numerics("expected", 4.0)
    for loss, difference in ((4.039, None), (4.041, "from iteration 1: lm_loss 4.041, expected 4"), (math.nan, "nan")):
        found = find_difference(expected, numerics("found", loss), "rounded losses")
        assert (difference is None) == (found is None)
        assert difference is None or difference in found
    assert find_difference(expected, numerics("found", 4.039), "the losses") == "from iteration 1: lm_loss"


def test_nothing_equals_a_reference_that_failed(tmp_path, monkeypatch):
    found = check(tmp_path, monkeypatch, Ranks(megatron_core="fails"), has_cuda=False)
    assert {result.verdict for result in found.results} == {"failed", "made", "no reference"}
