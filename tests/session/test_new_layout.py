"""The layout of a new job is planned, and on CPUs rehearsed beside simpler layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.model_units import UnitModels
from megatron.zero_bubble.mcore.rehearsal import Contender
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session import new_layout
from megatron.zero_bubble.session.layout_choice import ChosenLayout, choose_layout
from megatron.zero_bubble.session.new_layout import new_choice
from tests.session.layout_jobs import HEAVY, MODEL, flags

MILD = replace(HEAVY, output=replace(HEAVY.output, time_f=4, time_b=4, time_w=4))
"""A model for which a V without vocabulary shards is only a little slower than the best layout with shards."""
CPU = torch.device("cpu")
Choose = Callable[..., tuple[ChosenLayout, list[Contender]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, one_rank: dist.ProcessGroup) -> Choose:
    """Chooses on one rank, where the rehearsal takes as many milliseconds as a function of the contenders says."""

    def choose(
        times: Callable[[Contender], float],
        model: ModelCosts = MILD,
        device: torch.device | None = CPU,
        **given: object,
    ) -> tuple[ChosenLayout, list[Contender]]:
        rehearsed: list[Contender] = []

        def rehearse(contenders: Sequence[Contender], *more: object) -> list[float]:
            rehearsed.extend(contenders)
            return [times(contender) for contender in contenders]

        monkeypatch.setattr(new_layout, "rehearse", rehearse)
        asked = flags(**{"num_layers": len(model.layers), **given})
        return new_choice(asked, model, 1024, None if device is None else units_on(device)), rehearsed

    return choose


def units_on(device: torch.device) -> tuple[UnitModels, list[int]]:
    """Units that nobody builds."""

    def build(*given: object) -> torch.nn.Module:
        raise AssertionError("a unit is built")

    message = TensorSpec((8, 1, 16), torch.float32, device)
    return UnitModels(build, build, iter(()), message, lambda dense, expert: 0.0), []


def is_sharded(contender: Contender) -> bool:
    return contender.schedule.is_vocabulary_parallel


def is_megatrons(contender: Contender) -> bool:
    return contender.schedule.name == "1f1b"


def test_shards_are_kept_if_the_rehearsal_is_as_fast_as_the_plan(choose, capsys):
    choice, rehearsed = choose(lambda contender: 100.0 if is_sharded(contender) else 150.0)
    assert choice.flags["zero_bubble_vocabulary_parallel"] == "on"
    assert [is_sharded(contender) for contender in rehearsed] == [True, False, False]
    printed = capsys.readouterr().out
    speeds = re.search(
        r"^     rehearsed, times as fast as Megatron's split, 1f1b: (\S+) .*; (\S+) .* V$", printed, re.M
    )
    assert speeds
    assert speeds.groups() == ("1.500", "1.000")
    assert re.search(r"speed relative to Megatron's split: 1\.[34]\d\d under auto, 1\.500 under 1f1b$", printed, re.M)


def test_other_layouts_with_shards_are_corrected_like_the_rehearsed_one(choose, capsys):
    row = r"^     interleaved, 4 chunks, vocabulary shards +\S+ +([\d.]+) "
    choose(lambda contender: 0.0, device=None)
    [planned] = re.findall(row, capsys.readouterr().out, re.M)
    choose(lambda contender: 100.0)
    printed = capsys.readouterr().out
    [corrected] = re.findall(row, printed, re.M)
    [speed] = re.findall(r"1f1b: 1\.000 \(planned: ([\d.]+)\) [^;]*, vocabulary shards;", printed)
    assert float(corrected) == pytest.approx(float(planned) * float(speed), rel=1e-3)


def test_a_rehearsal_on_a_slower_machine_changes_no_prediction_for_megatrons_split(choose):
    fast, _ = choose(lambda contender: 100.0 if is_sharded(contender) else 150.0)
    slow, _ = choose(lambda contender: 300.0 if is_sharded(contender) else 450.0)
    assert slow.megatrons.work == fast.megatrons.work
    assert slow.megatrons.milliseconds == pytest.approx(fast.megatrons.milliseconds)


def test_the_prediction_for_megatrons_split_takes_the_speed_up_of_the_rehearsal(choose):
    """The job compares it with the simulated time of the chosen layout, which a rehearsal does not change."""
    (slow_split, _), (fast_split, _) = (
        choose(lambda contender, own=own: 100.0 if is_sharded(contender) else own) for own in (200.0, 150.0)
    )
    assert slow_split.flags == fast_split.flags
    assert slow_split.megatrons.milliseconds == pytest.approx(4 / 3 * fast_split.megatrons.milliseconds)


def test_shards_whose_collectives_take_longer_than_planned_lose_to_whole_layers(choose):
    times = {"linear": 180.0, "interleaved": 105.0, "v": 100.0}
    choice, _ = choose(lambda contender: times[contender.schedule.placement.kind])
    assert choice.flags["zero_bubble_vocabulary_parallel"] == "off"
    assert choice.flags["zero_bubble_placement"] == "v"


@pytest.mark.parametrize("time", [90.0, 101.0])
def test_megatrons_split_is_kept_if_its_own_schedule_is_at_most_slightly_slower(choose, time):
    choice, _ = choose(lambda contender: time if is_megatrons(contender) else 100.0 + 20 * is_sharded(contender))
    assert choice.is_megatrons_split
    assert choice.megatrons is None


def test_a_placement_that_a_flag_asks_for_is_kept_however_long_it_takes(choose):
    choice, rehearsed = choose(lambda contender: 1.0 if is_megatrons(contender) else 100.0, zero_bubble_placement="v")
    assert any(map(is_megatrons, rehearsed))
    assert choice.flags["zero_bubble_placement"] == "v"


def test_a_contender_has_the_layout_and_the_schedule_of_its_plan(choose):
    model = replace(MILD, layers=tuple(replace(layer, num_blocks=1.0) for layer in MILD.layers))
    tight = {"zero_bubble_memory_limit": "3MiB", "zero_bubble_placement": "linear"}
    plan = choose_layout(flags(num_layers=len(model.layers), **tight), model, None, 1024).plan
    _, [first, *_] = choose(lambda contender: 100.0, model, **tight)
    assert (first.layout, first.schedule, first.costs) == (plan.layout, plan.timeline.schedule, plan.timeline.costs)
    assert max(first.schedule.groups) > 1


EVEN = replace(MODEL, output=replace(MODEL.output, time_f=0.01, time_b=0.01, time_w=0.01))
SLOW = replace(MILD, layers=tuple(replace(layer, time_f=500.0) for layer in MILD.layers))


@pytest.mark.parametrize(
    ("model", "device", "given"),
    [
        (MILD, None, {}),
        (MILD, torch.device("meta"), {}),
        (SLOW, CPU, {}),
        (EVEN, CPU, {"zero_bubble_placement": "linear", "zero_bubble_vocabulary_parallel": "off"}),
    ],
    ids=["no units", "no CPU", "long steps", "Megatron's split"],
)
def test_nothing_is_rehearsed_where_nothing_is_left_to_decide(choose, model, device, given):
    choice, rehearsed = choose(lambda contender: 100.0, model, device, **given)
    assert rehearsed == []
    assert choice.request is not None


def test_all_gpus_take_part_in_measuring_the_free_memory_in_which_one_rank_plans(choose, monkeypatch):
    """A collective call that rank 0 alone makes would wait forever."""
    monkeypatch.setattr(new_layout, "own_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(new_layout, "least_free_bytes", lambda device: min(from_all_ranks(1e9)))
    choice, _ = choose(lambda contender: 100.0, device=None)
    assert max(choice.flags["zero_bubble_layout_limits"]) < 1e9
