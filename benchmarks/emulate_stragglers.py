"""Measure the cost of a straggler in real runs with emulated compute, and compare the cost with the simulation.

    python -m benchmarks.emulate_stragglers --num-replicas 8 --slowdown 5 --hierarchical-sgd 2:2,4:4,8:8

Every replica is a process. In each step, the replica sleeps for --time-step milliseconds (--slowdown times as long if
it straggles in this step), and then updates a model of --parameters parameters with its own gradient. Synchronous SGD
reduces the gradients over gloo in every step; local and hierarchical SGD average the parameters with the same code as
real trainings. All methods have the same stragglers as the simulation, and the benchmark checks that all methods end
with the same parameters. The methods take turns for --rounds rounds, and the table shows the median. On a shared
machine, `chrt -f 1` before the command (as root) gives the replicas priority over other processes.

The exit status is 1 if the gain of hierarchical SGD over synchronous SGD is more than 5% below the simulated gain. A
mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.emulation.sleeping import sleep_precisely, sleep_until, start_together
from megatron.zero_bubble.cli.estimate.stragglers import ReplicasFlags, time_per_step
from megatron.zero_bubble.cli.invocation import at_least, command, positive
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.runtime.group_averager import average, groups_of_replicas
from megatron.zero_bubble.session.flag_parser import flag

_TIMEOUT = timedelta(minutes=5)
_LEARNING_RATE = 1e-3
_TOLERANCE = 0.05
"""Largest fraction by which the gain in an emulated run may be below the simulated gain."""


@dataclass(frozen=True)
class StragglerEmulationFlags(ReplicasFlags, TableFlags):
    """emulation"""

    time_step: float = flag("time of a step without straggling, in ms", 40, parse=positive, metavar="MS")
    steps: int = flag("steps of a round, rounded up to the largest period", 32, parse=at_least(1), metavar="N")
    rounds: int = flag("rounds, in which all methods take turns", 3, parse=at_least(1), metavar="N")
    parameters: int = flag("parameters of the model", 100_000, parse=at_least(1), metavar="N")

    def times(self) -> list[list[float]]:
        """Step -> milliseconds of each replica."""
        period = self.hierarchical_sgd.levels[-1].period
        num_steps = -(-self.steps // period) * period
        return [[time * self.time_step for time in step] for step in self.draw_times(num_steps)]


class Replica:
    """One replica: a model of one tensor, with a gradient that is constant in time and different on each replica."""

    def __init__(self, flags: StragglerEmulationFlags) -> None:
        self._rank = dist.get_rank()
        self._times = [step[self._rank] / 1000 for step in flags.times()]
        self._gradient = torch.full((flags.parameters,), float(self._rank))
        self._mean_gradient = (flags.num_replicas - 1) / 2
        replicas = range(flags.num_replicas)
        sizes = {level.group_size for levels in flags.methods.values() if levels for level in levels.levels}
        self._groups = groups_of_replicas([replicas], sorted(sizes), _TIMEOUT)
        self._methods = flags.methods

    def run(self, method: str) -> float:
        """Run all steps; return the seconds from the common start to the end of this replica's last step."""
        parameters, hierarchy = torch.zeros_like(self._gradient), self._methods[method]
        start = start_together()
        for number, seconds in enumerate(self._times, 1):
            sleep_until(time.perf_counter() + seconds)
            gradient = self._gradient
            if hierarchy is None:
                gradient = gradient / dist.get_world_size()
                dist.all_reduce(gradient)
            parameters -= _LEARNING_RATE * gradient
            if hierarchy is not None and (size := hierarchy.group_size_after(number)) is not None:
                average([parameters], self._groups[size])
        ended = time.perf_counter() - start
        expected = torch.full_like(parameters, -_LEARNING_RATE * self._mean_gradient * len(self._times))
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-6)
        return ended


def run_replica(rank: int, flags: StragglerEmulationFlags, directory: Path) -> None:
    """Run every method once in each round, and write the seconds of this replica to a file."""
    torch.set_num_threads(1)
    sleep_precisely()
    store = dist.FileStore(str(directory / "store"), flags.num_replicas)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=flags.num_replicas, timeout=_TIMEOUT)
    replica = Replica(flags)
    seconds: dict[str, list[float]] = {name: [] for name in flags.methods}
    for _ in range(flags.rounds):
        for name in flags.methods:
            seconds[name].append(replica.run(name))
    (directory / f"replica{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def emulated(flags: StragglerEmulationFlags) -> dict[str, float]:
    """Run all replicas, and return the median milliseconds of a step of each method."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        # The server imports torch once and forks every replica.
        multiprocessing.set_forkserver_preload(["benchmarks.emulation.sleeping", average.__module__])
        torch.multiprocessing.start_processes(
            run_replica, args=(flags, directory), nprocs=flags.num_replicas, start_method="forkserver", daemon=True
        )
        replicas = [json.loads(path.read_text()) for path in sorted(directory.glob("replica*.json"))]
    num_steps = len(flags.times())
    return {
        name: statistics.median(max(ends) for ends in zip(*(each[name] for each in replicas), strict=True))
        * (1000 / num_steps)
        for name in flags.methods
    }


@command("benchmarks.emulate_stragglers", StragglerEmulationFlags, __doc__)
def main(flags: StragglerEmulationFlags) -> bool:
    times = flags.times()
    simulation = {name: time_per_step(times, levels) for name, levels in flags.methods.items()}
    measured = emulated(flags)
    gains = {
        name: (simulation["synchronous"] / expected, measured["synchronous"] / measured[name])
        for name, expected in simulation.items()
    }
    rows, document = [], {}
    for name, expected in simulation.items():
        document[name] = {"simulated": expected, "emulated": measured[name], "gains": gains[name]}
        difference = f"{measured[name] / expected - 1:+.1%}"
        each = (f"{gain:.3f}" for gain in gains[name])
        rows.append((name, f"{expected:.1f}", f"{measured[name]:.1f}", difference, *each))
    heads = ("SGD", "simulated (ms)", "emulated (ms)", "difference", "simulated gain", "emulated gain")
    flags.deliver(document, table(heads, rows, markdown=flags.markdown))
    simulated_gain, gain = gains["hierarchical"]
    return gain >= (1 - _TOLERANCE) * simulated_gain


if __name__ == "__main__":
    sys.exit(main())
