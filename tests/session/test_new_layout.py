"""The layout of a new job is planned, and on CPUs rehearsed beside simpler layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.rehearsal import Contender
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session import new_layout
from megatron.zero_bubble.session.layout_choice import ChosenLayout, choose_layout
from megatron.zero_bubble.session.new_layout import new_choice
from tests.session.test_layout_choice import HEAVY, MODEL, flags

MILD = replace(HEAVY, output=replace(HEAVY.output, time_f=4, time_b=4, time_w=4))
"""A model for which a V without vocabulary shards is only a little slower than the best layout with shards."""
CPU = TensorSpec((8, 1, 16), torch.float32, torch.device("cpu"))
Choose = Callable[..., tuple[ChosenLayout, list[Contender]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Chooses on one rank, where the rehearsal takes as many milliseconds as a function of the contenders says."""
    monkeypatch.setattr(new_layout, "on_rank", lambda rank, action: action())
    monkeypatch.setattr(new_layout, "print_rank_0", print)
    monkeypatch.setattr(new_layout.parallel_state, "get_pipeline_model_parallel_group", lambda: None)

    def choose(
        times: Callable[[Contender], float],
        model: ModelCosts = MILD,
        message: TensorSpec | None = CPU,
        **given: object,
    ) -> tuple[ChosenLayout, list[Contender]]:
        rehearsed: list[Contender] = []

        def rehearse(contenders: Sequence[Contender], *more: object) -> list[float]:
            rehearsed.extend(contenders)
            return [times(contender) for contender in contenders]

        monkeypatch.setattr(new_layout, "rehearse", rehearse)
        asked = flags(**{"num_layers": len(model.layers), **given})
        return new_choice(asked, model, 1024, message), rehearsed

    return choose


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
    assert re.search(r"as fast as, with Megatron's split: 1\.[34]\d\d times auto, 1\.500 times 1f1b$", printed, re.M)


def test_other_layouts_with_shards_are_corrected_like_the_rehearsed_one(choose, capsys):
    row = r"^     interleaved, 4 chunks, vocabulary shards +\S+ +([\d.]+) "
    choose(lambda contender: 0.0, message=None)
    [planned] = re.findall(row, capsys.readouterr().out, re.M)
    choose(lambda contender: 100.0)
    printed = capsys.readouterr().out
    [corrected] = re.findall(row, printed, re.M)
    [speed] = re.findall(r"1f1b: 1\.000 \(planned: ([\d.]+)\) interleaved, 3 chunks, vocabulary shards", printed)
    assert float(corrected) == pytest.approx(float(planned) * float(speed), rel=1e-3)


def test_a_rehearsal_on_a_slower_machine_changes_no_prediction_for_megatrons_split(choose):
    fast, _ = choose(lambda contender: 100.0 if is_sharded(contender) else 150.0)
    slow, _ = choose(lambda contender: 300.0 if is_sharded(contender) else 450.0)
    planned, _ = choose(lambda contender: 0.0, message=None)
    assert fast.megatrons == slow.megatrons == planned.megatrons


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


def test_a_contender_has_the_costs_of_its_operations_without_the_delays_that_the_rehearsal_has_itself(choose):
    delayed = replace(MILD, time_exchange=0.02, time_collective=0.03, fused_backward=0.9)
    _, rehearsed = choose(lambda contender: 100.0, delayed)
    [sharded] = filter(is_sharded, rehearsed)
    [megatrons] = filter(is_megatrons, rehearsed)
    output = MILD.output
    assert sharded.costs.time_s[0] == pytest.approx((output.time_f + output.time_b) / sharded.schedule.num_ranks)
    assert sum(sharded.costs.time_f) == pytest.approx(sum(layer.time_f for layer in MILD.layers))
    units = (MILD.embedding, *MILD.layers, output)
    backwards = sum(unit.time_b + unit.time_w for unit in units)
    assert sum(megatrons.costs.time_b) + sum(megatrons.costs.time_w) == pytest.approx(0.9 * backwards)


def test_groups_of_layers_take_their_time_within_b():
    """In little memory, stages recompute their layers in groups; a rehearsal has no layers that it could group."""
    model = replace(MILD, layers=tuple(replace(layer, num_blocks=1.0) for layer in MILD.layers))
    tight = flags(num_layers=16, zero_bubble_memory_limit="3MiB", zero_bubble_placement="linear")
    choice = choose_layout(tight, model, None, 1024)
    assert max(choice.plan.timeline.schedule.groups) > 1
    contender = new_layout._contender(choice.plan, choice.request)
    assert contender.schedule.groups == ()
    assert contender.schedule.ops == choice.plan.timeline.schedule.ops
    assert sum(contender.costs.time_b) > 1.1 * (sum(layer.time_b for layer in model.layers) + MILD.output.time_b)


EVEN = replace(MODEL, output=replace(MODEL.output, time_f=0.01, time_b=0.01, time_w=0.01))
SLOW = replace(MILD, layers=tuple(replace(layer, time_f=500.0) for layer in MILD.layers))


@pytest.mark.parametrize(
    ("model", "message", "given"),
    [
        (MILD, None, {}),
        (MILD, replace(CPU, device=torch.device("meta")), {}),
        (SLOW, CPU, {}),
        (EVEN, CPU, {"zero_bubble_placement": "linear", "zero_bubble_vocabulary_parallel": "off"}),
    ],
    ids=["no message", "no CPU", "long steps", "Megatron's split"],
)
def test_nothing_is_rehearsed_where_nothing_is_left_to_decide(choose, model, message, given):
    choice, rehearsed = choose(lambda contender: 100.0, model, message, **given)
    assert rehearsed == []
    assert choice.request is not None
