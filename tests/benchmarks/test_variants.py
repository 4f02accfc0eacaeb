"""The schedules that take turns in an emulated run: a plan with pairs is followed by the plan without."""

from __future__ import annotations

from benchmarks.emulation.arguments import EmulationFlags
from benchmarks.emulation.variants import contestants
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.schedule.kinds import PAIRED

SIZE = ["--pipeline-size", "4", "--num-microbatches", "16", "--num-chunks", "2", "--memory-limit", "6"]
NAMES = ["--schedule", "interleaved-pairs", "--schedule", "auto"]
EXCHANGES = ["--all-to-all-f", "6", "--all-to-all-b", "6"]


def test_after_a_plan_with_pairs_comes_the_plan_without_them():
    plans = contestants(read_flags(EmulationFlags, [*SIZE, *NAMES, *EXCHANGES], "", ""))
    by_name = {plan.schedule.name: plan for plan in plans}
    assert list(by_name) == ["interleaved-pairs", "auto", "auto, no pairs"]
    assert by_name["auto, no pairs"].schedule.kinds.isdisjoint(PAIRED)
    assert by_name["auto, no pairs"].makespan > 1.15 * by_name["auto"].makespan


def test_without_exchanges_nothing_is_planned_in_pairs():
    plans = contestants(read_flags(EmulationFlags, [*SIZE, "--schedule", "auto"], "", ""))
    assert [plan.schedule.name for plan in plans] == ["auto"]
