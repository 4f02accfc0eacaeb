"""Make, measure, compare, check and draw pipeline schedules, without a GPU and without torch."""

from __future__ import annotations

from megatron.zero_bubble.cli.invocation import read_flags, run_command
from megatron.zero_bubble.cli.output import deliver
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
    if not words:
        raise ValueError("the following arguments are required: COMMAND")
    if words[0] in ("-h", "--help"):
        deliver(_HELP, None)
        return
    if words[0] not in COMMANDS:
        raise ValueError(f"argument COMMAND: invalid choice: {words[0]!r} (choose from {', '.join(COMMANDS)})")
    command = COMMANDS[words[0]]
    text = f"{command.summary[0].upper()}{command.summary[1:]}.\n\nexample:\n  {prog} {command.example}".rstrip()
    command.run(read_flags(command.flags, words[1:], prog, text))
