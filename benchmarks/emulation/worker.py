"""Runs one rank of an emulated run, in a separate process."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.emulation.own_run import OwnRun
from benchmarks.emulation.peers import Peer, PeerRun
from benchmarks.emulation.reduction import ReductionCosts
from benchmarks.emulation.sleeping import Emulation, sleep_precisely, start_together
from megatron.zero_bubble.runtime.collectives import Collectives, TorchCollectives
from megatron.zero_bubble.runtime.communicator import TorchCommunicator, channels
from megatron.zero_bubble.runtime.message_times import measure_edges
from megatron.zero_bubble.runtime.recorder import StepTime, idle_share
from megatron.zero_bubble.schedule import Placement, Schedule, StageCosts
from megatron.zero_bubble.schedule.errors import one_line

_GATHERS = 9
"""Number of times that the gathering of the bubble rate is timed."""
_REDUCTIONS = 20
"""Number of times that the optimizer's reduction is timed."""


@dataclass(frozen=True)
class EmulatedJob:
    """The description of an emulated run, for all ranks."""

    num_ranks: int
    schedules: tuple[tuple[Schedule, StageCosts | tuple[StageCosts, ...]], ...]
    """Lowered schedules of this project, each with costs of every microbatch or a sequence with costs of each
    microbatch."""
    steps: int
    activation_bytes: int
    timeout: timedelta
    peers: tuple[Peer, ...] = ()
    directory: Path = Path()
    """Folder through which the ranks find each other, and into which each rank writes its records: `rank0.json`, ..."""
    reduction: ReductionCosts | None = None
    """Costs of reducing the gradients over data-parallel replicas; None without replicas."""
    tails_by_parameter: frozenset[str] = frozenset()
    """Names of the schedules in which the last W of each rank run parameter by parameter."""
    iterations: int = 1
    """Number of iterations of a step, without a barrier between iterations. If there are several iterations, each
    iteration ends with the optimizer's reduction, and the next iteration waits for the reduction, unless the schedule
    has post-validation."""

    @property
    def world_size(self) -> int:
        """Number of processes of all replicas; the ranks of one replica are `num_ranks` consecutive processes."""
        return self.num_ranks * (self.reduction.data_parallel_size if self.reduction else 1)


@dataclass(frozen=True)
class StepRecord:
    """One iteration of one schedule or peer on one rank, in seconds of `time.perf_counter`."""

    contestant: str
    start: float
    """The start time of the step, which is the same on all ranks."""
    first_start: float
    """Start of the first operation of this rank."""
    last_end: float
    returned: float
    busy: float
    """Processor time, in seconds, of the thread that ran the step."""
    exposed: float | None
    """Exposed communication: time of waiting for messages already sent or collectives already begun; None for peers."""
    ops: list[tuple[float, float]] | None = None
    """Start and end of every compute operation, in the order of the schedule; None for peers."""
    peak: float | None = None
    """Largest counted amount of this rank's activations, in M_B; None for peers."""


class StepRunner(Protocol):
    def step(self) -> None: ...


def run_rank(rank: int, job: EmulatedJob) -> None:
    """Run all schedules and peers of `job` in rounds, the first unmeasured, and write this rank's records."""
    torch.set_num_threads(1)
    sleep_precisely()
    store = dist.FileStore(str(job.directory / "store"), job.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=job.timeout)
    emulation = Emulation(job.activation_bytes)
    communicators = _open_channels(job, rank)
    replicas = _replicas(job, rank)
    group = _collectives(job, rank)
    ours = {
        schedule.name: OwnRun(
            schedule,
            costs,
            emulation,
            rank % job.num_ranks,
            communicators[schedule.placement],
            job.reduction,
            replicas,
            waits_for_optimizer=job.iterations > 1 and not schedule.has_post_validation,
            tail_by_parameter=schedule.name in job.tails_by_parameter,
            group=group,
        )
        for schedule, costs in job.schedules
    }
    peers, refused = _peer_runs(job, emulation, rank)
    contestants: dict[str, StepRunner] = {**ours, **peers}
    gc.collect()
    gc.freeze()
    records: list[StepRecord] = []
    for round_number in range(1 + job.steps):
        for name, contestant in contestants.items():
            step = _run_step(name, contestant, emulation, job.iterations if round_number > 0 else 1)
            records += step if round_number > 0 else ()
    report = {
        "steps": [asdict(record) for record in records],
        "refused": refused,
        "orders": {name: peer.order() for name, peer in peers.items()},
        "edges": {
            schedule.name: measure_edges(
                communicators[schedule.placement],
                schedule.placement,
                rank % job.num_ranks,
                emulation.spec,
                while_computing=False,  # emulated operations sleep
            )
            for schedule, _ in job.schedules
        },
        "gathers": [_seconds_to_gather() for _ in range(_GATHERS)],
        "reductions": _time_reductions() if job.iterations > 1 else [],
    }
    (job.directory / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    for own in ours.values():
        own.close()
    if group is not None:
        group.close()
    for communicator in set(communicators.values()):
        communicator.close()
    dist.destroy_process_group()


def _seconds_to_gather() -> float:
    """Return the seconds for gathering the bubble rate as training does for a log line, measured after a barrier."""
    step = StepTime(span=1.0, work=1.0)
    steps = [step] * dist.get_world_size()
    dist.barrier()
    begin = time.perf_counter()
    dist.all_gather_object(steps, step)
    idle_share(steps)
    return time.perf_counter() - begin


def _replicas(job: EmulatedJob, rank: int) -> dist.ProcessGroup | None:
    """Return the group of the processes that hold the same stages as `rank`; None without replicas."""
    if job.reduction is None:
        return None
    groups = [dist.new_group(list(range(first, job.world_size, job.num_ranks))) for first in range(job.num_ranks)]
    return groups[rank % job.num_ranks]


def _open_channels(job: EmulatedJob, rank: int) -> dict[Placement, TorchCommunicator]:
    """Return placement -> communicator; placements with the same channels share a communicator, to save time."""
    by_channels: dict[tuple[tuple[int, int], ...], TorchCommunicator] = {}
    by_placement: dict[Placement, TorchCommunicator] = {}
    for placement in dict.fromkeys(schedule.placement for schedule, _ in job.schedules):
        ends = tuple(channels(placement))
        if ends not in by_channels:
            first = rank - rank % job.num_ranks
            by_channels[ends] = TorchCommunicator(
                range(first, first + job.num_ranks), rank - first, placement, torch.device("cpu"), job.timeout
            )
        by_placement[placement] = by_channels[ends]
    return by_placement


def _collectives(job: EmulatedJob, rank: int) -> Collectives | None:
    """Return the group for the collectives of vocabulary shards; None if no schedule has vocabulary shards."""
    if not any(schedule.is_vocabulary_parallel for schedule, _ in job.schedules):
        return None
    first = rank - rank % job.num_ranks
    return TorchCollectives(range(first, first + job.num_ranks), rank - first, torch.device("cpu"), job.timeout)


def _peer_runs(job: EmulatedJob, emulation: Emulation, rank: int) -> tuple[dict[str, PeerRun], dict[str, str]]:
    """Return the peers that run with the job's sizes, and the reason for each peer that does not run."""
    runs: dict[str, PeerRun] = {}
    refused: dict[str, str] = {}
    for peer in job.peers:
        try:
            runs[f"torch {peer.name}"] = PeerRun(peer, emulation, rank)
        except ValueError as error:
            refused[f"torch {peer.name}"] = one_line(error)
    return runs, refused


def _run_step(name: str, contestant: StepRunner, emulation: Emulation, iterations: int) -> list[StepRecord]:
    """Run one step of a schedule or peer, and return a record for each iteration of the step."""
    gc.collect()
    start = start_together()
    records = []
    for _ in range(iterations):
        emulation.reset()
        begin = time.thread_time()
        contestant.step()
        returned, busy = time.perf_counter(), time.thread_time() - begin
        record = StepRecord(name, start, emulation.first_start, emulation.last_end, returned, busy, None)
        if isinstance(contestant, OwnRun):
            ops = [(measured.start, measured.end) for measured in contestant.recorder.take()]
            record = replace(record, exposed=contestant.exposed, ops=ops, peak=emulation.memory.peak)
        records.append(record)
    return records


def _time_reductions() -> list[float]:
    """Return the seconds from a common start to the end of an all-reduce of one number, for each repetition."""
    seconds = []
    for _ in range(_REDUCTIONS):
        start = start_together()
        dist.all_reduce(torch.zeros(1))
        seconds.append(time.perf_counter() - start)
    return seconds
