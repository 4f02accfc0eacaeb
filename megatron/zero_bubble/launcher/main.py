"""The program `python -m megatron.zero_bubble SCRIPT ARGUMENTS`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.zero_bubble.launcher.command_line import (
    PROGRAM,
    CommandLine,
    complete_script_arguments,
    help_text,
    parse_command_line,
)
from megatron.zero_bubble.launcher.foresight import check_script_arguments
from megatron.zero_bubble.launcher.launch import Launch
from megatron.zero_bubble.launcher.script import prepare_path, run_script
from megatron.zero_bubble.session.reports import print_line
from megatron.zero_bubble.session.start_up import SessionError, quiet_start_up, run_program


def main(argv: Sequence[str]) -> int:
    """Run the script that `argv` names; a user's mistake prints one line and gives exit status 2 on every rank."""
    return run_program(PROGRAM, lambda: _launch(argv), SessionError)


def _launch(argv: Sequence[str]) -> None:
    command = parse_command_line(argv)
    if command.wants_help and os.environ.get("RANK", "0") == "0":
        print_line(help_text())
    if command.script is not None:
        _run(command)


def _run(command: CommandLine) -> None:
    flags, script = command.flags, command.script
    assert script is not None
    prepare_path(script)
    if command.wants_help or not (flags.asks_for_schedule or flags.zero_bubble_cpu):
        run_script(script, command.script_arguments)
        return
    quiet_start_up()
    arguments = complete_script_arguments(flags, command.script_arguments)
    check_script_arguments(flags, arguments, os.environ)
    launch = Launch(flags)
    try:
        run_script(script, arguments)
    except SystemExit as end:
        # Megatron-LM raises SystemExit at --exit-interval and similar flags.
        if end.code not in (None, 0):
            raise
    if launch.script_hooks is not None:
        launch.script_hooks.check_trained()
    launch.close()
