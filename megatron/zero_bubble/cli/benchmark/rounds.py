"""`--mode train`: real trainings in rounds, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from megatron.zero_bubble.cli.benchmark.arguments import environment
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, Contestant, Field, gather
from megatron.zero_bubble.cli.benchmark.training_results import TrainResult
from megatron.zero_bubble.cli.benchmark.training_turn import Turn, take_turn
from megatron.zero_bubble.schedule import Placement, ScheduleError, Timeline, generate, simulate
from megatron.zero_bubble.schedule.formats import Profile, profile_from_json
from megatron.zero_bubble.training.flops import flops_per_iteration


def compare_trainings(arguments: argparse.Namespace, peers: Sequence[Contestant] = ()) -> list[TrainResult]:
    """Run all schedules in rounds. Raises `ValueError`, or `RuntimeError` if one that was asked for fails."""
    field = gather(arguments, torch.cuda.is_available(), peers)
    turns: dict[str, list[Turn]] = {one.name: [] for one in field.contestants}
    costs: dict[Placement, Profile] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for one in field.contestants:
                if one.name not in turns:
                    continue
                profile = Path(folder) / "profile.json" if one.is_ours else None
                turn = _turn(one, field, arguments, profile, number)
                if turn is None:
                    del turns[one.name]
                    continue
                turns[one.name].append(turn)
                if profile is not None and profile.exists():
                    costs.setdefault(one.placement, profile_from_json(profile.read_text()))
                    profile.unlink()
    return [_result(one, turns, field, arguments, costs) for one in field.contestants if one.name in turns]


def _turn(
    one: Contestant, field: Field, arguments: argparse.Namespace, profile: Path | None, number: int
) -> Turn | None:
    """None if it failed and does not have to run; then it takes no further turn."""
    begin = time.monotonic()
    output = () if profile is None else ("--zero-bubble-profile-output", str(profile))
    command = [*arguments.launch, *one.program, *one.words, *field.flags, *output]
    try:
        turn = take_turn(command, environment(), arguments.warmup, arguments.timeout)
    except RuntimeError as error:
        if one.is_required:
            raise RuntimeError(f"{one.name}: {error}") from error
        print(f"{one.name} left out: {error}", file=sys.stderr)
        return None
    print(
        f"round {number + 1} of {arguments.rounds}, {one.name}: {median(turn.iteration_ms):.1f} ms an iteration "
        f"({time.monotonic() - begin:.0f} s)",
        file=sys.stderr,
    )
    return turn


def _result(
    one: Contestant,
    turns: Mapping[str, list[Turn]],
    field: Field,
    arguments: argparse.Namespace,
    costs: Mapping[Placement, Profile],
) -> TrainResult:
    batch = field.args.global_batch_size
    assert batch is not None
    return TrainResult(
        contestant=one,
        turns=tuple(turns[one.name]),
        baseline=tuple(turns[BASELINE]),
        num_microbatches=arguments.num_microbatches,
        tokens=batch * field.args.seq_length,
        flops=flops_per_iteration(field.args, batch),
        world_size=arguments.world_size,
        simulated=_simulated(one, arguments, costs.get(one.placement)),
    )


def _simulated(one: Contestant, arguments: argparse.Namespace, profile: Profile | None) -> Timeline | None:
    if one.schedule is None or profile is None:
        return None
    try:
        schedule = generate(
            one.schedule,
            one.placement.num_ranks,
            arguments.num_microbatches,
            costs=profile.costs,
            num_chunks=one.placement.num_chunks,
            group_size=arguments.microbatch_group_size if one.placement.kind == "interleaved" else None,
        )
    except ScheduleError:
        return None
    return simulate(schedule, profile.costs)
