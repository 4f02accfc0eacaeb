"""Trains on ranks that may share a device, and compares the numerics of our schedules and megatron-core's schedule."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.check.matrix import NUM_RANKS, REFERENCE, ROUNDING, Cell, write_corpus
from megatron.zero_bubble.cli.check.rank_jobs import Backend, Ended, RankStart
from megatron.zero_bubble.cli.output import table

_PROBE = "an all-reduce"


@dataclass(frozen=True)
class CellResult:
    """The result of one training run over one communication backend."""

    layout: str
    cell: str
    backend: str
    verdict: str
    """`equal`, `differs`, `failed`, `reference`, `no reference` (the reference failed), or `made` (a checkpoint)."""
    detail: str
    seconds: float
    log: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict in ("reference", "made", "equal")


@dataclass(frozen=True)
class RankFindings:
    """The results of all training runs of `zero-bubble check`, over each communication backend of this machine."""

    results: Sequence[CellResult]
    refused: Mapping[str, Ended]
    """Backend that cannot connect the ranks -> the outcome of the all-reduce that tested this backend."""

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def as_json(self) -> dict[str, Any]:
        return {
            "refused": {backend: asdict(ended) for backend, ended in self.refused.items()},
            "trainings": [{**asdict(result), "passed": result.passed} for result in self.results],
        }

    def as_text(self, *, markdown: bool) -> str:
        """Return a table with a row for each training run and a column for each backend, and below the table the
        reasons for failures."""
        backends = list(dict.fromkeys(result.backend for result in self.results))
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for result in self.results:
            verdict = result.verdict if result.passed else result.verdict.upper()
            rows.setdefault((result.cell, result.layout), {})[result.backend] = verdict
        heads = (f"{NUM_RANKS} ranks, losses, norms and parameters", "layout", *backends)
        parts = [
            table(
                heads,
                [(*key, *(row.get(name, "not run") for name in backends)) for key, row in rows.items()],
                markdown=markdown,
            )
        ]
        parts += [f"{backend} cannot connect the ranks: {ended.error}\n" for backend, ended in self.refused.items()]
        parts += [
            f"{result.backend}, {result.layout}, {result.cell}: {result.verdict}: {result.detail}\n"
            for result in self.results
            if not result.passed
        ]
        return "\n".join(parts)


@dataclass(frozen=True)
class RankCheck:
    """Runs training jobs with one device for each rank; if there are too few devices, all ranks share the first device.

    Args:
        folder: an empty folder for the training data and for the files that the ranks write.
        time_limit: seconds that a training run may take.
    """

    has_cuda: bool
    folder: Path
    time_limit: float

    def run(self, everything: Sequence[Cell]) -> RankFindings:
        write_corpus(self.folder / "corpus")
        backends, refused = self._backends()
        results: list[CellResult] = []
        for backend in backends:
            results += self._run_over(backend, everything)
        return RankFindings(results, refused)

    def _backends(self) -> tuple[list[Backend], dict[str, Ended]]:
        if not self.has_cuda:
            return [Backend("gloo"), Backend("host")], {}
        print(f"{NUM_RANKS} ranks over NCCL: {_PROBE}", file=sys.stderr)
        [probe] = self._start({_PROBE: None}, Backend("nccl")).values()
        refused = {"nccl": probe} if probe.error is not None else {}
        names = ("host",) if refused else ("nccl", "host")
        return [Backend(name, one_queue) for name in names for one_queue in (False, True)], refused

    def _start(self, trainings: Mapping[str, Sequence[str] | None], backend: Backend) -> dict[str, Ended]:
        return RankStart(backend, NUM_RANKS, self.folder, self.time_limit).run(trainings)

    def _run_over(self, backend: Backend, everything: Sequence[Cell]) -> list[CellResult]:
        # With one hardware queue, messages between GPUs must have the same shape in all microbatches.
        if backend.one_queue and backend.name != "host":
            everything = [cell for cell in everything if "--variable-seq-lengths" not in cell.flags]
        # The collectives of vocabulary shards on GPUs always run over NCCL.
        if backend.name == "host" and self.has_cuda:
            everything = [cell for cell in everything if "--zero-bubble-vocabulary-parallel" not in cell.flags]
        print(f"{NUM_RANKS} ranks over {backend.title}: {len(everything)} trainings", file=sys.stderr)
        trainings = {}
        for cell in everything:
            more = ["--log-numerics", str(self._numerics(cell, backend))]
            if cell.is_ours:
                # The timeout is well before the limit, so that the log says where each rank is.
                more += ["--zero-bubble-timeout", f"{0.8 * self.time_limit:g}"]
                more += ["--zero-bubble-communicator", "host"] if backend.name == "host" else []
            trainings[cell.title] = [*cell.flags, *more]
        ended = self._start(trainings, backend)
        return [self._judge(cell, backend, ended[cell.title]) for cell in everything]

    def _numerics(self, cell: Cell, backend: Backend) -> Path:
        return self.folder / f"{backend.title}, {cell.title}.jsonl"

    def _judge(self, cell: Cell, backend: Backend, ended: Ended) -> CellResult:
        def result(verdict: str, detail: str = "", log: str = "") -> CellResult:
            return CellResult(cell.layout, cell.name, backend.title, verdict, detail, ended.seconds, log)

        if ended.error is not None:
            self._numerics(cell, backend).unlink(missing_ok=True)
            return result("failed", ended.error, ended.log)
        if cell.compares == "nothing":
            return result("made")
        # megatron-core's own numbers are compared, too: they must be equal with many hardware queues and with one.
        if cell.name == REFERENCE and not backend.one_queue:
            return result("reference")
        reference = self._numerics(Cell(cell.layout, REFERENCE, ()), Backend(backend.name))
        if not reference.exists():
            return result("no reference", "megatron-core's own training failed")
        difference = find_difference(reference, self._numerics(cell, backend), cell.compares)
        return result("equal") if difference is None else result("differs", difference)


def find_difference(expected: Path, actual: Path, compares: str) -> str | None:
    """Return a description of the first difference between two files of `--log-numerics`; None if the files agree.

    Args:
        compares: the values to compare, as in `Cell.compares`.
    """
    everything = compares == "everything"
    if everything and expected.read_bytes() == actual.read_bytes():
        return None
    ours, theirs = _numerics_of(actual), _numerics_of(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} iterations, megatron-core's own training has {len(theirs)}"
    for our, their in zip(ours, theirs, strict=True):
        names = tuple(their) if everything else ("iteration", "lm_loss")
        different = [name for name in names if our.get(name) != their[name]]
        if compares == "rounded losses" and different == ["lm_loss"]:
            actual_loss, expected_loss = (float.fromhex(line["lm_loss"]) for line in (our, their))
            different = (
                []
                if math.isclose(actual_loss, expected_loss, rel_tol=ROUNDING)
                else [f"lm_loss {actual_loss:g}, expected {expected_loss:g}"]
            )
        if different:
            return f"from iteration {their['iteration']}: {', '.join(different)}"
    return "all values are equal, but not the bytes of the files" if everything else None


def _numerics_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
