"""What a run recomputes follows from its flags; what contradicts itself is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule.formats import schedule_to_json
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.plans import choose_plan
from tests.checked_flags import checked, checked_job
from tests.session.planned_flags import KEPT, PLANNED, profile_of, refusal, schedule_file

FULL = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
BY_SCHEDULE = {"--zero-bubble-recompute": "planned"}
LEFT_TO_IT = "--zero-bubble-recompute planned lets the schedule choose recomputation: leave out"


@pytest.mark.parametrize("schedule", ["zb-h1", "auto", "interleaved-zb"])
def test_full_recomputation_is_an_operation_of_every_schedule(schedule: str):
    given = {**PLANNED, "--zero-bubble-schedule": schedule}
    for changes, recompute in ((FULL, Recompute.FULL), ({"--recompute-activations": None}, Recompute.NONE)):
        job = checked_job({**given, **changes})
        assert job.plan is not None
        assert job.plan.recompute is recompute
        assert job.plan.schedule(8).recomputes is (recompute is Recompute.FULL)


@pytest.mark.parametrize("eight_or_four", ["fp8", "fp4"])
def test_transformer_engines_checkpoints_stay_inside_b(eight_or_four: str):
    flags = checked_job({**PLANNED, **FULL}).flags
    plan = choose_plan(replace(flags, **{eight_or_four: "hybrid"}))
    assert plan is not None
    assert plan.recompute is Recompute.NONE


def test_planned_recomputation_is_planned_where_memory_is_limited():
    limited = {"--zero-bubble-memory-limit": "0.5"}
    for changes, recomputes in (({}, False), (limited, True)):
        plan = checked_job({**PLANNED, **BY_SCHEDULE, **changes}).plan
        assert plan is not None
        assert plan.recompute is Recompute.PLANNED
        assert plan.schedule(8).recomputes is recomputes
    assert refusal({**KEPT, **BY_SCHEDULE, "--zero-bubble-memory-limit": "0.01"}).startswith(
        "--zero-bubble-memory-limit 0.01: schedule auto needs at least 0."
    )


def test_planned_recomputation_leaves_nothing_to_megatrons_flags():
    for name, value in FULL.items():
        assert refusal({**BY_SCHEDULE, name: value}) == f"{LEFT_TO_IT} {name} {value}"
    selective = f"{LEFT_TO_IT} --recompute-granularity selective"
    assert refusal({**BY_SCHEDULE, "--recompute-activations": None}) == selective
    flags = replace(checked_job({**PLANNED, **BY_SCHEDULE}).flags, fp8="hybrid")
    with pytest.raises(
        ValueError, match=r"^--zero-bubble-recompute planned does not work with --fp8-format hybrid: [^\n]*$"
    ):
        choose_plan(flags)


@pytest.mark.parametrize("kinds", ["global_aux_loss", ["aux_loss", "global_aux_loss"], "quantile_balancing"])
def test_a_sum_over_microbatches_is_not_taken_in_another_order(kinds: str | list[str]):
    flags = checked_job({**PLANNED, **BY_SCHEDULE}).flags
    flags = replace(flags, given_model={**flags.given_model, "moe_router_load_balancing_type": kinds})
    with pytest.raises(
        ValueError, match=r"(global_aux_loss|quantile_balancing).*: it sums over microbatches in their order"
    ):
        choose_plan(flags)


def test_planned_recomputation_needs_a_schedule_that_plans_it(tmp_path: Path):
    assert refusal({**BY_SCHEDULE, "--zero-bubble-schedule": "zb-h1"}).startswith(
        "--zero-bubble-schedule zb-h1: schedule zb-h1 does not plan recomputation: choose one of zb-1p, zb-2p, auto,"
    )
    file = schedule_file(generate("zb-h1", 4, 8), tmp_path / "schedule.json")
    assert refusal({**BY_SCHEDULE, **file}) == (
        "--zero-bubble-recompute planned plans a schedule, but --zero-bubble-schedule "
        f"{file['--zero-bubble-schedule']} gives one: leave one of them out"
    )
    with pytest.raises(ValueError, match=r"^--zero-bubble-recompute needs --zero-bubble or --zero-bubble-schedule$"):
        checked(BY_SCHEDULE)


def test_a_file_with_recomputations_needs_a_model_that_recomputes(tmp_path: Path):
    file = schedule_file(generate("zb-h1", 4, 8, recompute=Recompute.FULL), tmp_path / "schedule.json")
    name = file["--zero-bubble-schedule"]
    assert refusal(file) == (
        f"--zero-bubble-schedule {name}: the schedule has recomputations (R), which need --recompute-granularity full "
        "without fp8 and fp4"
    )
    plan = checked_job({**PLANNED, **FULL, **file}).plan
    assert plan is not None
    assert (
        schedule_to_json(plan.schedule(8).without_communication()) == Path(str(name).removeprefix("file:")).read_text()
    )


def test_a_file_without_recomputations_gets_them(tmp_path: Path):
    plan = checked_job({**PLANNED, **FULL, **schedule_file(generate("zb-h1", 4, 8), tmp_path / "one.json")}).plan
    assert plan is not None
    assert plan.schedule(8).recomputes


def test_costs_without_those_of_r_plan_no_recomputation(tmp_path: Path):
    file = profile_of({}, tmp_path / "profile.json")
    kept = {**BY_SCHEDULE, "--zero-bubble-keep-layout": None}
    assert refusal({**kept, "--zero-bubble-profile-input": file}).endswith(
        "the profile lacks the costs of recomputation (R): measure it in a run that recomputes"
    )
