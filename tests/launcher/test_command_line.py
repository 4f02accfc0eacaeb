"""The launcher's flags are taken out of the command line, and what they imply for the script is added."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.launcher.command_line import (
    LaunchFlags,
    complete_script_arguments,
    flags_from_keywords,
    help_text,
    parse_command_line,
)
from megatron.zero_bubble.launcher.foresight import check_script_arguments
from megatron.zero_bubble.launcher.mistakes import LauncherError
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
    ],
)
def test_mistakes_are_told_in_one_line(script, arguments, words):
    with pytest.raises(LauncherError) as error:
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
        ("no-such-schedule", P4, ()),
    ],
)
def test_a_schedule_of_several_chunks_makes_the_script_build_them(schedule, given, added):
    assert complete_script_arguments(LaunchFlags(zero_bubble_schedule=schedule), given) == [*given, *added]


def test_padding_becomes_a_layout():
    flags = LaunchFlags(zero_bubble_schedule="zb-h1", allow_padding_num_layers=True)
    layout = ["--pipeline-model-parallel-layout", "Et*2|t*3|t*3|t*2L"]
    assert complete_script_arguments(flags, P4) == [*P4, *layout]
    again = ("--num-layers=4", *P4)
    assert complete_script_arguments(flags, again) == [*again, *layout], "the last of a flag counts"
    even = ("--num-layers", "8", *P4[2:])
    assert complete_script_arguments(flags, even) == list(even)
    chunked = complete_script_arguments(flags, (*P4, *RANK_2))
    assert chunked == [*P4, layout[0], "Et*1|t*2|t*2|t*1|t*1|t*1|t*1|t*1L"], "Megatron-LM takes one of the two flags"
    with pytest.raises(LauncherError, match="--num-layers 3"):
        complete_script_arguments(flags, ("--num-layers", "3", *P4[2:]))


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
    with pytest.raises(LauncherError, match=r"'memory'.*memory_limit"):
        flags_from_keywords("zb-h1", False, {"memory": "1.5"})


def test_layers_that_the_ranks_do_not_divide_are_refused_only_where_no_layout_is_chosen():
    arguments = ["--num-layers", "7", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
    environment = {"WORLD_SIZE": "2"}
    check_script_arguments(LaunchFlags(zero_bubble=True), arguments, environment)
    for fixed in ({"zero_bubble": True, "zero_bubble_keep_layout": True}, {"zero_bubble_schedule": "zb-h1"}):
        with pytest.raises(LauncherError, match=r"--num-layers 7 is not a multiple .* --allow-padding-num-layers"):
            check_script_arguments(LaunchFlags(**fixed), arguments, environment)


def test_looking_ahead_does_not_load_megatron_core():
    """megatron-core must be imported after the substitutions for a machine without CUDA, which it reads then."""
    arguments = ["--num-layers", "4", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
    arguments += ["--pipeline-model-parallel-layout", "Et|t|t|tL"]
    program = (
        "import sys; from megatron.zero_bubble.launcher.command_line import LaunchFlags; "
        "from megatron.zero_bubble.launcher.foresight import check_script_arguments; "
        f"check_script_arguments(LaunchFlags(zero_bubble_schedule='zb-v'), {arguments}, {{'WORLD_SIZE': '2'}}); "
        "print('megatron.core' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "False"
