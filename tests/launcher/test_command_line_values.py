"""Values of `enable`'s settings and of the script's sizes are checked before the training starts."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.launcher.command_line import LaunchFlags, check_script_arguments, flags_from_keywords
from megatron.zero_bubble.session.start_up import SessionError


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("memory_limit", 1.5, "1.5"),
        ("recompute", True, "planned"),
        ("vocabulary_parallel", True, "on"),
        ("profile_iters", (3, 6), [3, 6]),
        ("replan_threshold", "0.1", 0.1),
        ("keep_layout", False, False),
        ("timeline", None, None),
    ],
)
def test_enable_converts_values_as_the_command_line_does(name, value, kept):
    assert getattr(flags_from_keywords(None, True, {name: value}), f"zero_bubble_{name}") == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recompute", "full"),
        ("offload", "on"),
        ("vocabulary_parallel", False),
        ("placement", "V"),
        ("communicator", "nccl"),
        ("timeout", "soon"),
        ("profile_iters", 5),
        ("keep_layout", "yes"),
        ("replan_threshold", "often"),
    ],
)
def test_enable_refuses_a_wrong_value_in_one_line(name, value):
    with pytest.raises(SessionError, match=rf"^argument --zero-bubble-{name.replace('_', '-')}: .*") as error:
        flags_from_keywords(None, True, {name: value})
    assert "\n" not in str(error.value)


def test_enable_refuses_a_schedule_that_is_neither_known_nor_a_file():
    with pytest.raises(
        SessionError, match=r"^--zero-bubble-schedule zb-9: schedule 'zb-9' is unknown: choose one of .*$"
    ):
        flags_from_keywords("zb-9", True, {})
    assert flags_from_keywords("file:order.json", True, {}).zero_bubble_schedule == "file:order.json"


def test_enable_takes_one_value_of_a_flag_with_one_value():
    with pytest.raises(SessionError, match="unrecognized arguments: 2"):
        flags_from_keywords(None, True, {"memory_limit": ["1", "2"]})


SIZES = ["--num-layers", "8", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "2"]


def test_a_global_batch_that_microbatches_do_not_divide_is_refused_before_megatron_starts():
    flags, environment = LaunchFlags(zero_bubble_schedule="zb-h1"), {"WORLD_SIZE": "4"}
    given = [*SIZES, "--global-batch-size", "6"]
    message = r"^--global-batch-size 6 is not a multiple of --micro-batch-size 2 x 2 data-parallel replicas = 4$"
    with pytest.raises(SessionError, match=message):
        check_script_arguments(flags, given, environment)
    check_script_arguments(flags, [*given, "--decrease-batch-size-if-needed"], environment)


@pytest.mark.parametrize("name", ["--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"])
def test_two_flags_for_the_number_of_chunks_are_refused_before_megatron_starts(name):
    given = [*SIZES, "--pipeline-model-parallel-layout", "Et|t*3|t*3|tL", name, "4"]
    with pytest.raises(SessionError, match=rf"^give {name} or --pipeline-model-parallel-layout, not both$"):
        check_script_arguments(LaunchFlags(zero_bubble_schedule="auto"), given, {"WORLD_SIZE": "2"})
