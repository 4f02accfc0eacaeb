"""`--zero-bubble-offload auto` needs a limit and measured copies, and refuses what it does not support in one line."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts
from megatron.zero_bubble.schedule.formats import schedule_to_json
from megatron.zero_bubble.session.flags import check_zero_bubble_flags
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.plans import choose_plan

GIVEN = {
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 8,
    "num_layers": 4,
    "zero_bubble_schedule": "auto",
    "zero_bubble_offload": "auto",
    "zero_bubble_memory_limit": "0.8",
}


def job(**flags) -> JobFlags:
    return JobFlags(**{**GIVEN, **flags})


@pytest.mark.parametrize("name", ["auto", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min"])
def test_planned_schedules_may_offload(name):
    limit = {"zero_bubble_schedule": name, "zero_bubble_memory_limit": "2"}
    plan = choose_plan(job(**limit))
    assert plan is not None
    assert plan.offloads
    for off in ("off", None):
        kept = choose_plan(job(zero_bubble_offload=off, **limit))
        assert kept is not None
        assert not kept.offloads


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"zero_bubble_memory_limit": None}, "needs --zero-bubble-memory-limit"),
        ({"zero_bubble_schedule": "file:plan.json"}, "plans a schedule, but --zero-bubble-schedule file:plan.json"),
        ({"zero_bubble_profile_iters": [0, 0]}, "needs measured copies, and --zero-bubble-profile-iters 0 0"),
        ({"zero_bubble_microbatch_order": "planned"}, "because orders cannot be planned together with copies"),
        ({"variable_seq_lengths": True}, "the order of microbatches is planned anew in every step"),
        ({"use_torch_fsdp2": True}, "would copy the parameters that --use-torch-fsdp2 gathers"),
        ({"fp8": "e4m3"}, "tensors of these types are not copied"),
        ({"transformer_impl": "transformer_engine"}, "use local, or --zero-bubble-recompute planned"),
        (
            {"recompute_granularity": "full"},
            "--recompute-granularity full: nothing that is recomputed is copied; use --zero-bubble-recompute planned",
        ),
        ({"overlap_moe_expert_parallel_comm": True}, "a forward in a pair is not copied"),
    ],
)
def test_what_cannot_work_is_one_line_with_the_flag(flags, words):
    with pytest.raises(ValueError, match="--zero-bubble-offload auto") as caught:
        choose_plan(job(**flags))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"zero_bubble_microbatch_order": "planned"}, "and --zero-bubble-microbatch-order planned: leave one out"),
        ({"variable_seq_lengths": True}, "the order of microbatches is planned anew in every step"),
        ({"use_torch_fsdp2": True}, "would copy the parameters that --use-torch-fsdp2 gathers"),
        ({"transformer_impl": "transformer_engine"}, "use local, or --zero-bubble-recompute planned"),
    ],
)
def test_copies_in_a_schedule_from_a_file_have_the_same_limits(tmp_path, flags, words):
    costs = StageCosts.uniform(2, 10, 10, 10, time_d=3, memory_d=0.9)
    schedule = generate("zb-1p", 2, 8, costs=costs, memory_limit=1.2, offloads=True)
    assert schedule.offloads
    file = tmp_path / "copies.json"
    file.write_text(schedule_to_json(schedule))
    given = {"zero_bubble_schedule": f"file:{file}", "zero_bubble_offload": None, "zero_bubble_memory_limit": None}
    assert choose_plan(job(**given)) is not None
    with pytest.raises(ValueError, match=r"--zero-bubble-offload auto|the copies of --zero-bubble-schedule") as caught:
        choose_plan(job(**given, **flags))
    assert words in str(caught.value)


def test_it_needs_a_zero_bubble_schedule():
    with pytest.raises(ValueError, match="--zero-bubble-offload needs --zero-bubble or --zero-bubble-schedule"):
        check_zero_bubble_flags(job(zero_bubble_schedule=None, zero_bubble_memory_limit=None))
