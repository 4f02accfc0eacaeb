"""Make, measure, compare, check and draw pipeline schedules, without a GPU and without torch."""

from __future__ import annotations

from megatron.zero_bubble.cli.invocation import choose_command, read_flags, run_command
from megatron.zero_bubble.cli.schedule.commands import COMMANDS

_PROG = "zero-bubble schedule"
_WIDTH = max(map(len, COMMANDS))
_HELP = f"""\
usage: {_PROG} COMMAND [flags]

{__doc__}

commands:
{chr(10).join(f"  {name:<{_WIDTH}}  {command.summary}" for name, command in COMMANDS.items())}

examples:
{chr(10).join(f"  {_PROG} {name} {command.example}".rstrip() for name, command in COMMANDS.items())}

`{_PROG} COMMAND --help` lists the flags of a command.
A mistake ends with one line and exit status 2, and nothing is written.
"""


def main(argv: list[str]) -> int:
    prog = f"{_PROG} {argv[0]}" if argv and argv[0] in COMMANDS else _PROG
    return run_command(prog, lambda: _run(argv, prog))


def _run(words: list[str], prog: str) -> None:
    name, rest = choose_command(COMMANDS, words, _HELP)
    command = COMMANDS[name]
    example = f"\n\nexample:\n  {prog} {command.example}".rstrip()
    command.run(read_flags(command.flags, rest, prog, f"{command.summary[0].upper()}{command.summary[1:]}.{example}"))
