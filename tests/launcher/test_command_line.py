"""The launcher's flags are taken out of the command line, and what they imply for the script is added."""

from __future__ import annotations

import copy
import subprocess
import sys
from argparse import Namespace
from inspect import signature
from pathlib import Path

import pytest

from megatron.zero_bubble.launcher.command_line import (
    LaunchFlags,
    check_script_arguments,
    complete_script_arguments,
    flags_from_keywords,
    help_text,
    parse_command_line,
)
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_choice import validate_arguments
from megatron.zero_bubble.session.start_up import SessionError
from tests.launch import ROOT


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "pretrain.py"
    path.touch()
    return str(path)


def test_our_flags_may_stand_anywhere_and_the_rest_keeps_its_order(script):
    theirs = ["--lr", "-1e-3", "--split", "9,1", "path", "--bf16", "--lr=2", "-x"]
    ours = ["--zero-bubble-schedule", "zb-h1", "--zero-bubble-profile-iters", "2", "4", "--zero-bubble-cpu"]
    command = parse_command_line([*ours[:2], script, *theirs[:3], *ours[2:5], *theirs[3:5], ours[5], *theirs[5:]])
    assert command.script == Path(script)
    assert list(command.script_arguments) == theirs
    assert command.flags == LaunchFlags(
        zero_bubble_schedule="zb-h1", zero_bubble_profile_iters=[2, 4], zero_bubble_cpu=True
    )


def test_flags_that_are_in_use_elsewhere_are_taken(script):
    aliases = ["--enable-zero-bubble", "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup", "half"]
    command = parse_command_line([script, *aliases, "--enable-exactly-numeric-match", "--allow-padding-num-layers"])
    assert command.flags.zero_bubble_schedule == "v-half"
    assert command.flags.allow_padding_num_layers
    assert command.script_arguments == ()


def test_without_our_flags_nothing_is_asked_for(script):
    command = parse_command_line([script, "--num-layers", "4"])
    assert command.flags == LaunchFlags()
    assert not command.flags.asks_for_schedule


def test_help_is_ours_and_then_the_script_s(script):
    assert parse_command_line(["--help"]).script is None
    command = parse_command_line([script, "--help"])
    assert command.wants_help
    assert command.script_arguments == ("--help",)
    assert all(flag in help_text() for flag in ("--zero-bubble-schedule", "--zero-bubble-cpu", "SCRIPT"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["SCRIPT"]),
        (["--num-layers", "4", "pretrain.py"], ["script", "--num-layers"]),
        (["missing.py"], ["missing.py"]),
        (["SCRIPT", "--zero-bubble-shedule", "zb-h1"], ["--zero-bubble-shedule"]),
        (
            ["SCRIPT", "--zero-bubble", "--zero-bubble-rollback", "inverse"],
            ["--zero-bubble-rollback", "--zero-bubble-post-validation"],
        ),
        (["SCRIPT", "--zero-bubble-timeline", "out"], ["--zero-bubble-timeline", "--zero-bubble-schedule"]),
        (["SCRIPT", "--zero-bubble-profile-iters", "2"], ["--zero-bubble-profile-iters"]),
        (["SCRIPT", "--allow-padding-num-layers"], ["--allow-padding-num-layers", "--zero-bubble-schedule"]),
    ],
)
def test_mistakes_are_told_in_one_line(script, arguments, words):
    with pytest.raises(SessionError) as error:
        parse_command_line([script if argument == "SCRIPT" else argument for argument in arguments])
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


P4 = ("--num-layers", "10", "--pipeline-model-parallel-size", "4")
RANK_2 = ("--num-virtual-stages-per-pipeline-rank", "2")
CHUNK_1 = ("--num-layers-per-virtual-pipeline-stage", "1")


@pytest.mark.parametrize(
    ("schedule", "given", "added"),
    [
        ("zb-h1", P4, ()),
        ("zb-v", P4, RANK_2),
        ("interleaved-zb", P4, RANK_2),
        ("interleaved-zb", (*P4, *CHUNK_1), ()),
        ("zb-v", (*P4, "--pipeline-model-parallel-layout=Et|tL"), ()),
        ("zb-v", (*P4, "--hybrid-layer-pattern", "*-*-"), ()),
        ("no-such-schedule", P4, ()),
    ],
)
def test_a_schedule_of_several_chunks_makes_the_script_build_them(schedule, given, added):
    assert complete_script_arguments(LaunchFlags(zero_bubble_schedule=schedule), given) == [*given, *added]


def validated(flags: LaunchFlags, **given: object) -> tuple[Namespace, Namespace]:
    """The script's arguments, of 10 layers on 4 ranks, as Megatron-LM validates them, and afterwards."""
    names = ("pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank")
    script = Namespace(**{**dict.fromkeys(names), "num_layers": 10, "pipeline_model_parallel_size": 4, **given})
    seen: list[Namespace] = []
    validate = lambda args: seen.append(copy.copy(args))  # noqa: E731
    validate_arguments(flags, Call(validate, signature(validate).bind(script)))
    return seen[0], script


def test_padding_becomes_a_layout_of_the_script():
    padded = LaunchFlags(zero_bubble_schedule="zb-h1", allow_padding_num_layers=True)
    seen, after = validated(padded)
    assert seen == after
    assert seen.pipeline_model_parallel_layout == "Et*2|t*3|t*3|t*2L"
    chunked, after = validated(padded, num_virtual_stages_per_pipeline_rank=2)
    assert chunked == after
    assert chunked.pipeline_model_parallel_layout == "Et*1|t*2|t*2|t*1|t*1|t*1|t*1|t*1L"
    assert chunked.num_virtual_stages_per_pipeline_rank is None, "Megatron-LM takes one of the two flags"
    for flags, given in ((padded, {"num_layers": 8}), (LaunchFlags(zero_bubble_schedule="zb-h1"), {})):
        assert validated(flags, **given)[0].pipeline_model_parallel_layout is None
    with pytest.raises(SessionError, match="--num-layers 3"):
        validated(padded, num_layers=3)


def test_an_open_layout_is_one_only_while_the_script_validates_it():
    seen, after = validated(LaunchFlags(zero_bubble=True), num_virtual_stages_per_pipeline_rank=2, mtp_num_layers=1)
    assert seen.pipeline_model_parallel_layout == "Et*1|t*2|t*2|t*1|t*1|t*1|t*1|t*1mL"
    assert after.pipeline_model_parallel_layout is None
    assert after.num_virtual_stages_per_pipeline_rank == 2


PATTERN = {"hybrid_layer_pattern": "*-*M-*-E*-/*", "hybrid_override_pattern": None}


def test_a_pattern_is_divided_where_the_schedule_needs_several_chunks():
    seen, after = validated(LaunchFlags(zero_bubble_schedule="zb-v"), **PATTERN)
    assert seen == after
    assert seen.hybrid_layer_pattern == "*|-*|M-|*|-|E|*|-/*"
    assert seen.pipeline_model_parallel_layout is None
    older = {"hybrid_layer_pattern": None, "hybrid_override_pattern": "*-*-*-*-"}
    assert validated(LaunchFlags(zero_bubble_schedule="zb-v"), **older)[0].hybrid_override_pattern == "*|-|*|-|*|-|*|-"


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ({"zero_bubble_schedule": "zb-h1"}, PATTERN),
        ({"zero_bubble": True}, PATTERN),
        ({"zero_bubble_schedule": "zb-v"}, {**PATTERN, "hybrid_layer_pattern": "*-|*M|-*-|E*-/*"}),
    ],
)
def test_other_patterns_stay_as_they_are(flags, given):
    seen, _ = validated(LaunchFlags(**flags), **given)
    assert seen.hybrid_layer_pattern == given["hybrid_layer_pattern"]
    assert seen.pipeline_model_parallel_layout is None


def test_what_megatron_says_about_a_pattern_is_one_line():
    def validate(args: Namespace) -> None:
        raise ValueError("In main pattern, 'X' is not a valid layer symbol.")

    script = Namespace(**PATTERN, num_layers=None, pipeline_model_parallel_size=2)
    call = Call(validate, signature(validate).bind(script))
    with pytest.raises(SessionError, match=r"^In main pattern, 'X' is not a valid layer symbol\.$"):
        validate_arguments(LaunchFlags(zero_bubble_schedule="zb-h1"), call)


def test_a_pattern_that_is_to_be_divided_takes_no_other_flags_for_its_stages():
    with pytest.raises(SessionError, match=r"^--hybrid-layer-pattern \*-\*M.*the \| give the layers"):
        validated(LaunchFlags(zero_bubble_schedule="zb-v"), **PATTERN, decoder_first_pipeline_num_layers=3)


@pytest.mark.parametrize(
    ("schedule", "pattern", "error"),
    [
        ("zb-h1", "*-|*-|*-", r"\*-\|\*-\|\*- has 3 stages, but 2 pipeline ranks with 1 model chunks each hold 2"),
        ("zb-v", "*-|*-", r"\*-\|\*- has 2 stages, but 2 pipeline ranks with 2 model chunks each hold 4"),
        ("zb-h1", "*-*", r"--num-layers 3 is not a multiple of the 2 stages"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused_before_the_script_starts(schedule, pattern, error):
    flags = LaunchFlags(zero_bubble_schedule=schedule)
    environment = {"WORLD_SIZE": "2"}
    for name in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
        arguments = [name, pattern, "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
        with pytest.raises(SessionError, match=error):
            check_script_arguments(flags, arguments, environment)


@pytest.mark.parametrize("schedule", ["auto", "interleaved-zb"])
def test_groups_of_too_few_microbatches_are_refused_before_the_script_starts(schedule):
    sizes = {"--num-layers": 8, "--pipeline-model-parallel-size": 2, "--micro-batch-size": 1, "--global-batch-size": 8}
    chunks = {"--num-virtual-stages-per-pipeline-rank": 2, "--microbatch-group-size-per-virtual-pipeline-stage": 1}
    arguments = [str(word) for pair in {**sizes, **chunks}.items() for word in pair]
    with pytest.raises(SessionError, match=r"^--microbatch-group-size-per-virtual-pipeline-stage 1: give at least 2"):
        check_script_arguments(LaunchFlags(zero_bubble_schedule=schedule), arguments, {"WORLD_SIZE": "2"})


def test_enable_takes_the_flags_by_name():
    flags = flags_from_keywords("zb-h1", True, {"timeline": "out", "profile_iters": [1, 2]})
    assert flags == LaunchFlags(
        zero_bubble_schedule="zb-h1",
        zero_bubble_cpu=True,
        zero_bubble_timeline="out",
        zero_bubble_profile_iters=[1, 2],
    )
    assert flags_from_keywords(None, False, {"memory_limit": "1.5"}).zero_bubble, "planned, unless a schedule is named"
    assert flags_from_keywords(None, False, {"v_schedule": True}).zero_bubble_schedule == "zb-v"
    with pytest.raises(SessionError, match=r"'memory'.*memory_limit"):
        flags_from_keywords("zb-h1", False, {"memory": "1.5"})


def test_layers_that_the_ranks_do_not_divide_are_refused_only_where_no_layout_is_chosen():
    arguments = ["--num-layers", "7", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
    environment = {"WORLD_SIZE": "2"}
    check_script_arguments(LaunchFlags(zero_bubble=True), arguments, environment)
    for fixed in ({"zero_bubble": True, "zero_bubble_keep_layout": True}, {"zero_bubble_schedule": "zb-h1"}):
        with pytest.raises(SessionError, match=r"--num-layers 7 is not a multiple .* --allow-padding-num-layers"):
            check_script_arguments(LaunchFlags(**fixed), arguments, environment)


def test_a_script_without_a_micro_batch_size_may_have_a_default_or_a_loop_of_its_own():
    arguments = ["--num-layers", "4", "--pipeline-model-parallel-size", "2"]
    check_script_arguments(LaunchFlags(zero_bubble=True), arguments, {"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    "name", ["--micro-batch-size", "--context-parallel-size", "--num-layers-per-virtual-pipeline-stage"]
)
def test_a_size_of_zero_is_refused_before_megatron_starts(name: str):
    arguments = ["--num-layers", "4", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", name, "0"]
    with pytest.raises(SessionError, match=f"^{name} must be at least 1, got 0$"):
        check_script_arguments(LaunchFlags(zero_bubble=True), arguments, {"WORLD_SIZE": "2"})


def test_looking_ahead_does_not_load_megatron_core():
    """megatron-core must be imported after the substitutions for a machine without CUDA, which it reads then."""
    arguments = ["--num-layers", "4", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
    arguments += ["--pipeline-model-parallel-layout", "Et|t|t|tL"]
    program = (
        "import sys; from megatron.zero_bubble.launcher.command_line import LaunchFlags; "
        "from megatron.zero_bubble.launcher.command_line import check_script_arguments; "
        f"check_script_arguments(LaunchFlags(zero_bubble_schedule='zb-v'), {arguments}, {{'WORLD_SIZE': '2'}}); "
        "print('megatron.core' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "False"
