"""Runs training jobs one after the other on the same ranks; after a failure, new ranks run the remaining jobs."""

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

import torch

from megatron.zero_bubble.cli.check.rank import BEGINS
from megatron.zero_bubble.cli.trainings import failure_reason

ROOT = Path(__file__).resolve().parents[4]
"""The folder that contains `megatron/zero_bubble`: a clone of the repository, or site-packages."""
_SECONDS_FOR_THE_OTHERS = 5.0
"""Seconds to wait for the other ranks after a rank has failed, because their logs may contain the reason."""
_LOG_SIZE = 4000
"""Number of characters that are kept from the end of each rank's log after a failure."""
_START_UP_LIMIT = 300.0
"""Seconds that the ranks may take to import torch and megatron-core."""


@dataclass(frozen=True)
class Backend:
    """A communication backend, with the environment variables and flags that the backend needs."""

    name: str
    """Name of the backend: `nccl`, `gloo`, or `host`, which sends all tensors through host memory over gloo."""
    one_queue: bool = False
    """Whether the device has one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)."""

    @property
    def title(self) -> str:
        return f"{self.name}, one queue" if self.one_queue else self.name

    def environment(self) -> dict[str, str]:
        """Return the ranks' environment: this process's variables, some defaults, and the setting for one queue."""
        environment = {"OMP_NUM_THREADS": "1"}
        if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
            # All ranks are on this machine, which may have no network.
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if self.name == "nccl":
            environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
        return {**environment, **os.environ, **({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.one_queue else {})}


@dataclass(frozen=True)
class Ended:
    """Outcome of a training job."""

    seconds: float
    error: str | None = None
    log: str = ""
    """The last characters of each rank's log if the training job failed."""


@dataclass(frozen=True)
class RankStart:
    """Starts ranks on this machine and runs training jobs on them.

    Args:
        folder: folder for the files that the ranks read and write.
        time_limit: seconds that a job may take.
        module: module that every rank runs.
    """

    backend: Backend
    num_ranks: int
    folder: Path
    time_limit: float
    module: str = "megatron.zero_bubble.cli.check.rank"

    def run(self, trainings: Mapping[str, Sequence[str] | None]) -> dict[str, Ended]:
        """Run all training jobs, even if some fail; return the outcome of each job, by the job's title.

        Args:
            trainings: the flags of each training job, by the job's title; for a title with None in place of flags, the
                ranks run only an all-reduce.
        """
        results: dict[str, Ended] = {}
        while rest := {title: flags for title, flags in trainings.items() if title not in results}:
            results |= self._attempt(rest)
        return results

    def _attempt(self, trainings: Mapping[str, Sequence[str] | None]) -> dict[str, Ended]:
        """Start the ranks once and run training jobs until one fails; return the outcomes of the jobs that ran.

        If the ranks cannot start, the function returns a failure for every job.
        """
        folder = self.folder / f"job {time.monotonic_ns()}"
        folder.mkdir()
        plan = {
            "backend": "gloo" if self.backend.name == "host" else self.backend.name,
            "over_host": self.backend.name == "host",
            "limit": self.time_limit,
            "trainings": trainings,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        ranks = [self._start_rank(rank, folder) for rank in range(self.num_ranks)]
        try:
            error, status = self._wait(ranks, folder)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return self._results(list(trainings), folder, error, status)

    def _start_rank(self, rank: int, folder: Path) -> subprocess.Popen[bytes]:
        has_enough_devices = torch.cuda.is_available() and torch.cuda.device_count() >= self.num_ranks
        environment = self.backend.environment() | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "WORLD_SIZE": str(self.num_ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if has_enough_devices else 0),
        }
        command = [sys.executable, "-m", self.module, str(folder / "plan.json")]
        with open(_log(rank, folder), "w") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _wait(self, ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> tuple[str | None, int]:
        """Wait until all ranks end, a rank fails or time runs out; return an error (or None) and an exit status."""
        begun, since = 0, time.monotonic()
        while True:
            statuses = [rank.poll() for rank in ranks]
            if any(statuses):
                deadline = time.monotonic() + _SECONDS_FOR_THE_OTHERS
                while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
                    time.sleep(0.05)
                return None, next(status for status in statuses if status)
            if all(status == 0 for status in statuses):
                return None, 0
            if begun != len(progress := _progress(folder)):
                begun, since = len(progress), time.monotonic()
            limit = self.time_limit if begun else _START_UP_LIMIT
            if time.monotonic() - since > limit:
                return f"ended because it was not done within {limit:g} s", -1
            time.sleep(0.05)

    def _results(self, titles: Sequence[str], folder: Path, error: str | None, status: int) -> dict[str, Ended]:
        results = {}
        began = 0.0
        for event, title, at in _progress(folder):
            if event == BEGINS:
                began = at
            else:
                results[title] = Ended(at - began)
        failed = [title for title in titles if title not in results]
        if failed and (error or status):
            logs = [_log(rank, folder).read_text(errors="replace") for rank in range(self.num_ranks)]
            reported = failure_reason("\n".join(logs))
            reason = "; ".join(filter(None, (error, reported))) or f"a rank ended with status {status}"
            excerpts = "".join(f"rank {rank}:\n{log[-_LOG_SIZE:]}\n" for rank, log in enumerate(logs))
            ended = Ended(time.time() - began if began else 0.0, reason, excerpts)
            # Ranks that never began their first training job would not do so in another attempt either.
            results |= dict.fromkeys(failed if not began else failed[:1], ended)
        return results


def _progress(folder: Path) -> list[Any]:
    path = folder / "progress.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _log(rank: int, folder: Path) -> Path:
    return folder / f"rank{rank}.log"
