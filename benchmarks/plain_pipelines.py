"""Compare pipelines of plain PyTorch layers with real compute: this package's, torch's and DeepSpeed's.

    OMP_NUM_THREADS=1 python -m benchmarks.plain_pipelines
    OMP_NUM_THREADS=1 python -m benchmarks.plain_pipelines --model linear --schedule zb-h1 --schedule zb-v --rounds 9

All pipelines train the same layers on two ranks. The pipelines take turns within each round, in the same processes. All
pipelines begin with the same weights, and the benchmark fails unless their losses equal the losses of one process. A
turn is a few steps with their optimizer steps, from a common start to the end of the last rank; with post-validation,
this package's pipelines also compute the norm of all gradients. The table shows the median time of a step with its 95%
interval, and the ratio to the time of this package's fastest schedule in the same rounds. The row "without a bubble"
has the time of a step without a bubble and without messages: half of the time that one process takes for all layers
while the other rank does the same work.

DeepSpeed takes part if it is installed: `DS_BUILD_OPS=0 pip install deepspeed`. Give every rank a separate core.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.plain_contestants import TRAININGS, PlainPipeline, PlainTraining, contestants
from megatron.zero_bubble.cli.benchmark.training_results import bootstrap_interval
from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.session.flag_parser import flag

_PROG = "benchmarks.plain_pipelines"
_NUM_RANKS = 2
_OUTSIDE = "one process"
_KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""Settings with which glibc keeps freed memory. Without these settings, glibc returns freed tensors of megabytes to the
system, and page faults for new tensors take up to a sixth of a step, at random times and in any pipeline."""


@dataclass(frozen=True)
class PlainFlags(TableFlags):
    """what is measured"""

    model: list[str] | None = flag("what is trained; by default all", None, choices=list(TRAININGS), action="append")
    schedule: list[str] | None = flag(
        "schedule of Pipeline; by default 1f1b, zb-2p and zb-v", None, action="append", metavar="NAME"
    )
    num_microbatches: int = flag("microbatches of a step", 4, parse=at_least(1), metavar="M")
    rounds: int = flag("rounds, in each of which every contestant has a turn", 7, parse=at_least(3), metavar="N")
    steps: int = flag("steps of a turn, whose mean is one measurement", 3, parse=at_least(1), metavar="N")


@dataclass
class PlainStepTimes:
    """Round -> seconds of a step of one pipeline."""

    name: str
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return median(self.rounds)

    def cells(self, fastest: PlainStepTimes) -> list[str]:
        low, high = bootstrap_interval(self.rounds) or (self.seconds, self.seconds)
        cells = [self.name, f"{1000 * self.seconds:.1f}", f"{1000 * low:.1f} .. {1000 * high:.1f}"]
        if self.name == _OUTSIDE:
            return [f"without a bubble ({_OUTSIDE} / {_NUM_RANKS})", *cells[1:], "", ""]
        ratios = [own / of_fastest for own, of_fastest in zip(self.rounds, fastest.rounds, strict=True)]
        low, high = bootstrap_interval(ratios) or (median(ratios), median(ratios))
        return [*cells, f"{median(ratios):.3f}", f"{low:.3f} .. {high:.3f}"]


@command(_PROG, PlainFlags, __doc__)
def main(flags: PlainFlags) -> bool:
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_NUM_RANKS)]
        environment = {**_KEEPS_MEMORY, **os.environ}
        return subprocess.run([*launcher, "-m", _PROG, *sys.argv[1:]], env=environment, check=False).returncode == 0
    dist.init_process_group("gloo")
    documents: list[dict[str, Any]] = []
    texts = []
    for name in flags.model or list(TRAININGS):
        results = _measure(TRAININGS[name](flags.num_microbatches), flags)
        documents.append({"model": name, "seconds": {result.name: result.rounds for result in results}})
        texts.append(f"{name}, {_NUM_RANKS} ranks, {flags.num_microbatches} microbatches:\n\n{_table(results, flags)}")
    if dist.get_rank() == 0:
        flags.deliver(documents, "\n".join(texts))
    dist.destroy_process_group()
    return True


def _measure(training: PlainTraining, flags: PlainFlags) -> list[PlainStepTimes]:
    makers = contestants(flags.schedule or ["1f1b", "zb-2p", "zb-v"])
    made = {name: make(training) for name, make in makers.items()}
    _check_losses(made)
    results = [PlainStepTimes(name) for name in made]
    for _ in range(flags.rounds):
        for result in results:
            share = 1 / _NUM_RANKS if result.name == _OUTSIDE else 1
            result.rounds.append(_seconds_of_a_step(made[result.name], flags.steps) * share)
    return results


def _check_losses(made: dict[str, PlainPipeline]) -> None:
    """Run three steps of each pipeline; raise `RuntimeError` if the losses differ from the losses of one process."""
    losses: dict[str, list[float]] = {}
    for name, contestant in made.items():
        found = [float(loss) for loss in [contestant.step() for _ in range(3)] if loss is not None]
        contestant.settle()
        of_ranks: list[Any] = [None] * _NUM_RANKS
        dist.all_gather_object(of_ranks, found)
        losses[name] = max(of_ranks, key=len)[:2]
    for name, of_contestant in losses.items():
        if not torch.allclose(torch.tensor(of_contestant), torch.tensor(losses[_OUTSIDE]), rtol=1e-5):
            raise RuntimeError(f"{name} has the losses {of_contestant}, one process has {losses[_OUTSIDE]}")


def _seconds_of_a_step(contestant: PlainPipeline, num_steps: int) -> float:
    """Run a turn; return the time from a common start to the end of the last rank, divided by `num_steps`."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        contestant.step()
    contestant.settle()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds) / num_steps


def _table(results: list[PlainStepTimes], flags: PlainFlags) -> str:
    fastest = min((one for one in results if one.name.startswith("Pipeline")), key=lambda one: one.seconds)
    heads = ("", "step (ms)", "95% interval", f"to {fastest.name.removeprefix('Pipeline, ')}", "95% interval")
    return table(heads, [result.cells(fastest) for result in results], markdown=flags.markdown)


if __name__ == "__main__":
    sys.exit(main())
