"""Runs the training runs of `zero-bubble benchmark` in rounds: in each round, one run under every schedule.

Rounds spread the load of other programs on the machine about equally over all schedules.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, Competition, Contestant, gather
from megatron.zero_bubble.cli.benchmark.training_results import TrainResult
from megatron.zero_bubble.cli.benchmark.training_turn import Turn, take_turn
from megatron.zero_bubble.cli.invocation import value_of
from megatron.zero_bubble.planner import PlanRequest, schedule_of
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts, Timeline, simulate
from megatron.zero_bubble.schedule.formats import profile_from_json
from megatron.zero_bubble.schedule.recomputation import Recompute

_Costs = dict[tuple[Placement | None, bool], StageCosts]
"""(placement, whether the vocabulary is sharded) -> measured costs of the stages."""


def compare_trainings(flags: BenchmarkFlags, peers: Sequence[Contestant] = ()) -> list[TrainResult]:
    """Train once under every schedule in each round; return a result for each schedule whose runs all succeeded.

    Raises:
        ValueError: a training run would refuse its flags, or a schedule is unknown.
        RuntimeError: a training run failed under a schedule for which `Contestant.is_required` is True.
    """
    competition = gather(flags, torch.cuda.is_available(), peers)
    turns: dict[Contestant, list[Turn]] = {contestant: [] for contestant in competition.contestants}
    costs: _Costs = {}
    placements: dict[Contestant, Placement] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(flags.rounds):
            for contestant in [*turns]:
                profile = Path(folder) / "profile.json" if contestant.measures_costs else None
                turn = _run_turn(contestant, competition, flags, profile, number)
                if turn is None:
                    del turns[contestant]
                    continue
                turns[contestant].append(turn)
                if profile is not None and profile.exists():
                    measured = profile_from_json(profile.read_text())
                    placements[contestant] = measured.placement
                    costs.setdefault((measured.placement, measured.costs.has_vocabulary), measured.costs_without_waits)
                    profile.unlink()
    baseline = next(tuple(own) for contestant, own in turns.items() if contestant.name == BASELINE)
    return [
        TrainResult(
            each,
            tuple(own),
            baseline,
            flags,
            competition.args,
            # A training may have chosen another placement than its schedule has by default.
            _simulated_schedule(each, competition, flags, costs)
            if placements.get(each) in (None, each.placement)
            else None,
        )
        for each, own in turns.items()
    ]


def _run_turn(
    contestant: Contestant, competition: Competition, flags: BenchmarkFlags, profile: Path | None, number: int
) -> Turn | None:
    """Run one training under a schedule; return None if the run failed and `Contestant.is_required` is False."""
    start = time.monotonic()
    output = () if profile is None else ("--zero-bubble-profile-output", str(profile))
    print(f"round {number + 1} of {flags.rounds}, {contestant.name}: trains ...", file=sys.stderr, flush=True)
    command = [*flags.launcher, *contestant.program, *competition.flags, *contestant.words, *output]
    # On a CPU, each rank computes with one thread, because all ranks share the cores.
    threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}
    try:
        turn = take_turn(command, {**threads, **os.environ}, flags.warmup, flags.timeout)
    except RuntimeError as error:
        if contestant.is_required:
            raise RuntimeError(f"{contestant.name}: {error}") from error
        print(f"{contestant.name} left out: {error}", file=sys.stderr)
        return None
    line = f"round {number + 1} of {flags.rounds}, {contestant.name}: {median(turn.iteration_ms):.1f} ms an iteration "
    line += f"({time.monotonic() - start:.0f} s)"
    if turn.layout is not None:
        line += f"; {turn.layout}"
    if turn.pipeline_ms is not None:
        line += f"; {turn.pipeline_ms:.1f} ms in the pipeline, {turn.predicted_ms:.1f} predicted"
    print(line, file=sys.stderr)
    return turn


def _measured_costs(contestant: Contestant, measured: _Costs) -> StageCosts | None:
    """Return the measured costs of the stages under a schedule; None if no costs were measured.

    If only costs with vocabulary shards were measured, the costs of the shards move to the first and last stage.
    """
    own = measured.get((contestant.placement, contestant.spreads_vocabulary))
    if own is not None or contestant.spreads_vocabulary:
        return own
    spread = measured.get((contestant.placement, True))
    return None if spread is None else spread.with_whole_vocabulary()


def _simulated_schedule(
    contestant: Contestant, competition: Competition, flags: BenchmarkFlags, measured: _Costs
) -> Timeline | None:
    placement, costs = contestant.placement, _measured_costs(contestant, measured)
    if contestant.schedule is None or placement is None or costs is None:
        return None
    group_size = flags.microbatch_group_size if placement.kind == "interleaved" else None
    recompute = Recompute.NONE
    if value_of("--recompute-granularity", (*competition.flags, *contestant.words)) == "full" and any(costs.time_r):
        if contestant.measures_costs:
            recompute = Recompute.FULL
        else:  # other schedules than this project's recompute in the backward
            costs = costs.recomputing_in_backward()
    request = PlanRequest(contestant.schedule, flags.num_microbatches, (placement,), costs, group_size=group_size)
    request = replace(request, recomputes=(recompute,), vocabulary_parallel=contestant.spreads_vocabulary)
    try:
        schedule = schedule_of(request)
    except ScheduleError:
        return None
    return simulate(schedule, costs)
