"""Starts ranks that run one training after the other, each within a time limit, and new ranks after a failure."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_cli.failure import failure_reason

from gpu_check_cli.rank import BEGINS

_SECONDS_FOR_THE_OTHERS = 5.0
"""That ranks have to end by themselves once one of them has: what they say may be the reason."""
_LOG_SIZE = 4000
"""Characters of each rank's log that a failure keeps."""


@dataclass(frozen=True)
class Backend:
    """How ranks talk to each other."""

    name: str
    """`nccl`, `gloo`, or `host`: everything through host memory and gloo."""
    has_cuda: bool
    one_queue: bool = False
    """With CUDA_DEVICE_MAX_CONNECTIONS=1."""

    @property
    def title(self) -> str:
        return f"{self.name}, one queue" if self.one_queue else self.name

    @property
    def torch_backend(self) -> str:
        return "gloo" if self.name == "host" else self.name

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a schedule of ours."""
        return ("--zero-bubble-communicator", "host") if self.name == "host" else ()

    def environment(self) -> dict[str, str]:
        """What the ranks need; a variable that is set already is left as it is, but for the number of queues."""
        environment = {"OMP_NUM_THREADS": "1"}
        if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
            # One machine, perhaps without a network.
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if self.name == "nccl":
            environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
        environment |= os.environ
        if self.one_queue:
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        return environment


@dataclass(frozen=True)
class Ended:
    """How a training ended."""

    seconds: float
    error: str | None = None
    log: str = ""
    """The end of what the ranks printed, of a training that failed."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    training: float
    start_up: float = 300.0
    """Of the ranks: four imports of torch and megatron-core."""


def run_trainings(
    trainings: Mapping[str, Sequence[str] | None],
    backend: Backend,
    num_ranks: int,
    paths: Sequence[Path],
    folder: Path,
    limits: Limits,
) -> dict[str, Ended]:
    """Run all of them, whichever fails.

    Args:
        trainings: the flags of each; None for one all-reduce instead of a training.
        paths: where the ranks find modules.
        folder: for what the ranks write.
    """
    results: dict[str, Ended] = {}
    while rest := {title: flags for title, flags in trainings.items() if title not in results}:
        job = _Job(rest, backend, num_ranks, paths, folder / f"job {time.monotonic_ns()}", limits)
        results |= job.run()
    return results


class _Job:
    """One start of the ranks, to the first training that fails."""

    def __init__(
        self,
        trainings: Mapping[str, Sequence[str] | None],
        backend: Backend,
        num_ranks: int,
        paths: Sequence[Path],
        folder: Path,
        limits: Limits,
    ) -> None:
        self._titles = list(trainings)
        self._folder, self._limits = folder, limits
        self._num_ranks = num_ranks
        folder.mkdir()
        plan = {
            "backend": backend.torch_backend,
            "over_host": backend.name == "host",
            "limit": limits.training,
            "trainings": trainings,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        self._environment = backend.environment() | {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "WORLD_SIZE": str(num_ranks),
        }

    def run(self) -> dict[str, Ended]:
        """How the trainings ended up to the first that failed."""
        ranks = [self._start(rank) for rank in range(self._num_ranks)]
        try:
            error, status = self._wait(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return self._results(error, status)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        local_rank = rank if _num_devices() >= self._num_ranks else 0
        environment = self._environment | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        command = [sys.executable, "-m", "gpu_check_cli.rank", str(self._folder / "plan.json")]
        with open(self._log(rank), "w") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _wait(self, ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[str | None, int]:
        """Until all ranks have ended well, one has failed, or a training has taken too long: why, and the status."""
        begun, since = 0, time.monotonic()
        while True:
            statuses = [rank.poll() for rank in ranks]
            if any(statuses):
                _wait_a_little(ranks)
                return None, next(status for status in statuses if status)
            if all(status == 0 for status in statuses):
                return None, 0
            if begun != len(progress := self._progress()):
                begun, since = len(progress), time.monotonic()
            limit = self._limits.training if begun else self._limits.start_up
            if time.monotonic() - since > limit:
                return f"not done after {limit:g} s", -1
            time.sleep(0.05)

    def _results(self, error: str | None, status: int) -> dict[str, Ended]:
        results = {}
        began = 0.0
        for what, title, at in self._progress():
            if what == BEGINS:
                began = at
            else:
                results[title] = Ended(at - began)
        failed = [title for title in self._titles if title not in results]
        if failed and (error or status):
            logs = [self._log(rank).read_text(errors="replace") for rank in range(self._num_ranks)]
            said = failure_reason("\n".join(logs))
            reason = "; ".join(filter(None, (error, said))) or f"a rank ended with status {status}"
            excerpts = "".join(f"rank {rank}:\n{log[-_LOG_SIZE:]}\n" for rank, log in enumerate(logs))
            ended = Ended(time.time() - began if began else 0.0, reason, excerpts)
            # Ranks that never came to their first training will not the next time either.
            results |= dict.fromkeys(failed if not began else failed[:1], ended)
        return results

    def _progress(self) -> list[Any]:
        path = self._folder / "progress.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _wait_a_little(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _SECONDS_FOR_THE_OTHERS
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)


def _num_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
